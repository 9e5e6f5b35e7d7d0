// The trip count of a loop with a barrier depends on the lane.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  float sum = 0;
  for (uint step = 0; step <= lane % 3; step++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // DEFECT barrier-divergence
    sum += tile[127 - t];
  }
  out[i] = sum;
}
