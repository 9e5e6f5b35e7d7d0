// A tile reused with a barrier on both sides.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  float sum = 0;
  for (int step = 0; step < 4; step++) {
    tile[t] = x[i] + step;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[127 - t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[i] = sum;
}
