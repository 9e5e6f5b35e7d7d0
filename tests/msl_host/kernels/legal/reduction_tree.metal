// A tree reduction in threadgroup memory.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  for (uint step = 64; step > 0; step /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < step) tile[t] += tile[t + step];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[0];
}
