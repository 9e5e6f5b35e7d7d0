// Half of the threads do not reach the barrier.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  if (t < 64)
    threadgroup_barrier(mem_flags::mem_threadgroup);  // DEFECT barrier-divergence
  out[i] = tile[t];
}
