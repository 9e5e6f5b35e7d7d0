// <metal_atomic>. The runtime performs the operation, and lets other threads run before it.
#pragma once
namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
  thread_scope_system,
};

template <class T>
struct atomic {
  T value;
};
template <class T>
using _atomic = atomic<T>;
// Macros: OpenCL has types of these names.
#define atomic_int atomic<int>
#define atomic_uint atomic<uint>
#define atomic_float atomic<float>
#define atomic_bool atomic<bool>
#define atomic_ulong atomic<ulong>

MSL_SIMD inline void atomic_thread_fence(mem_flags flags, memory_order order = memory_order_seq_cst,
                                         thread_scope scope = thread_scope_device) {
  msl_fence(uint(flags), order, scope >= thread_scope_device);
}

template <class T>
constexpr __constant uint msl_atomic_type = is_same<T, int>::value ? 0
    : is_same<T, uint>::value                                      ? 1
    : is_same<T, float>::value                                     ? 2
    : sizeof(T) == 8                                               ? 3
                                                                   : 4;
template <class T>
MSL_F ulong msl_atomic_bits(T value) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8, "Metal has no atomics of this size");
  if constexpr (sizeof(T) == 1) return as_type<uchar>(value);
  else if constexpr (sizeof(T) == 4) return as_type<uint>(value);
  else return as_type<ulong>(value);
}
template <class T>
MSL_F T msl_atomic_value(ulong bits) {
  if constexpr (sizeof(T) == 1) return as_type<T>((uchar)bits);
  else if constexpr (sizeof(T) == 4) return as_type<T>((uint)bits);
  else return as_type<T>(bits);
}

template <class T>
MSL_SIMD T atomic_load_explicit(const volatile atomic<T>* p, memory_order order) {
  return msl_atomic_value<T>(msl_atomic((volatile void*)p, 0, msl_atomic_type<T>, 0, 0, order));
}
template <class T, class V>
MSL_SIMD void atomic_store_explicit(volatile atomic<T>* p, V value, memory_order order) {
  msl_atomic(p, 1, msl_atomic_type<T>, msl_atomic_bits((T)value), 0, order);
}
#define MSL_ATOMIC(name, op)                                                                                    \
  template <class T, class V>                                                                                   \
  MSL_SIMD T atomic_##name##_explicit(volatile atomic<T>* p, V value, memory_order order) {                     \
    return msl_atomic_value<T>(msl_atomic(p, op, msl_atomic_type<T>, msl_atomic_bits((T)value), 0, order));     \
  }
MSL_ATOMIC(exchange, 2)
MSL_ATOMIC(fetch_add, 3)
MSL_ATOMIC(fetch_sub, 4)
MSL_ATOMIC(fetch_and, 5)
MSL_ATOMIC(fetch_or, 6)
MSL_ATOMIC(fetch_xor, 7)
MSL_ATOMIC(fetch_min, 8)
MSL_ATOMIC(fetch_max, 9)
#undef MSL_ATOMIC
template <class T, class E, class V>
MSL_SIMD bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, E* expected, V desired,
                                                    memory_order success, memory_order) {
  ulong wanted = msl_atomic_bits((T)*expected);
  ulong old = msl_atomic(p, 10, msl_atomic_type<T>, msl_atomic_bits((T)desired), wanted, success);
  *expected = msl_atomic_value<T>(old);
  return old == wanted;
}

}  // namespace metal
