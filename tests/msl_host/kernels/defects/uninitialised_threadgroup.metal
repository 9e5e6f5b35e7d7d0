// Half of the tile is never written.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  if (t < 64) tile[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[127 - t];  // DEFECT uninitialised-threadgroup
}
