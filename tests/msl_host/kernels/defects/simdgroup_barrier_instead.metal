// A SIMD-group barrier where threads of other SIMD-groups are read.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];  // DEFECT race-write-after-read
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[(t + 32) & 127];  // DEFECT race-read-after-write uninitialised-threadgroup
}
