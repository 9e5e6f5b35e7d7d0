// A grid rounded up, with a guard, and the barrier outside of it.
// run: grid=512 threadgroup=128 n=500 size=500
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    const constant int& n [[buffer(2)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  bool inside = i < uint(n);
  tile[t] = inside ? x[i] : 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (inside) out[i] = tile[t] + tile[127 - t];
}
