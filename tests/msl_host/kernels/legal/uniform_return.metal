// A whole threadgroup leaves before the barrier.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]]) {
  threadgroup float tile[128];
  if (g == 2) {
    out[i] = 0;
    return;
  }
  tile[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[127 - t];
}
