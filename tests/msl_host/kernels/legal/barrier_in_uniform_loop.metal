// A loop whose trip count is the same for the threadgroup.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]]) {
  threadgroup float tile[128];
  tile[t] = x[i];
  float sum = 0;
  for (uint step = 0; step <= g; step++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += tile[(t + step) & 127];
  }
  out[i] = sum;
}
