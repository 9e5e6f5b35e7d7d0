// All threads of a threadgroup take the same call of a function with a barrier, in a loop too.
// run: grid=128 threadgroup=64
#include <metal_stdlib>
using namespace metal;

__attribute__((noinline)) float sum(threadgroup float* a, uint i, float value) {
  a[i] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint half_way = 32; half_way > 0; half_way /= 2) {
    if (i < half_way) a[i] += a[i + half_way];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  float result = a[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result;
}

[[kernel]] void k(
    device float* out [[buffer(0)]],
    uint i [[thread_position_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]],
    uint at [[thread_position_in_grid]]) {
  threadgroup float a[64];
  float result = group % 2 ? sum(a, i, i) : sum(a, i, 1);
  for (int j = 0; j < 2; j++) result += sum(a, i, result);
  out[at] = result;
}
