// Two tiles in turn need one barrier an iteration.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[2][128];
  float sum = 0;
  for (int step = 0; step < 6; step++) {
    tile[step & 1][t] = x[i] + step;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[step & 1][127 - t];
  }
  out[i] = sum;
}
