// What kernels call in the runtime, and in the C library's mathematics.
#pragma once

struct msl_matrix_shape {
  int rows, columns, depth;
  int transpose_left, transpose_right, accumulate;
  int layout;  // 0: 8x8 SIMD-group matrix, 1: 16x16 fragments of cooperative tensors
};

extern "C" {
uint msl_lane();
uint msl_attribute(uint which, uint axis);
ulong msl_buffer(uint index);  // an address, of device or constant memory
void* msl_threadgroup(uint id, ulong size, const __constant char* name);
void* msl_threadgroup_argument(uint index, const __constant char* name);
void msl_barrier(uint mem_flags, uint scope) __attribute__((convergent));
void msl_fence(uint mem_flags, uint order, uint device_scope) __attribute__((convergent));
void msl_shuffle(void* out, const void* in, uint size, int source) __attribute__((convergent));
uint msl_gather(void* out, const void* in, uint size) __attribute__((convergent));
void msl_reduce(void* value, uint type, uint op, uint width) __attribute__((convergent));
ulong msl_ballot(uint predicate) __attribute__((convergent));
void msl_matrix_product(const void* shape, void* out, const void* left, const void* right) __attribute__((convergent));
ulong msl_atomic(volatile void* address, uint op, uint type, ulong bits, ulong expected, uint order)
    __attribute__((convergent));

float expf(float);
float exp2f(float);
float exp10f(float);
float expm1f(float);
float logf(float);
float log2f(float);
float log10f(float);
float log1pf(float);
float sinf(float);
float cosf(float);
float tanf(float);
float asinf(float);
float acosf(float);
float atanf(float);
float atan2f(float, float);
float sinhf(float);
float coshf(float);
float tanhf(float);
float asinhf(float);
float acoshf(float);
float atanhf(float);
float powf(float, float);
float fmodf(float, float);
float nextafterf(float, float);
}

// A `threadgroup T name[N];` of the kernel becomes a reference to this.
template <class T>
struct msl_type {
  using type = T;
};
template <class T>
MSL_F threadgroup T* msl_threadgroup_variable(uint id, const __constant char* name) {
  return (threadgroup T*)msl_threadgroup(id, sizeof(T), name);
}
