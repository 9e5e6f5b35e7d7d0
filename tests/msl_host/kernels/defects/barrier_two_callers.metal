// Threads of one threadgroup reach the barrier of a function through different calls.
// run: grid=64 threadgroup=64
#include <metal_stdlib>
using namespace metal;

__attribute__((noinline)) void set(threadgroup float* a, uint i, float value) {
  a[i] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // DEFECT barrier-divergence
}

[[kernel]] void k(device float* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  if (i < 32)
    set(a, i, 1);
  else
    set(a, 95 - i, 2);
  out[i] = a[63 - i];
}
