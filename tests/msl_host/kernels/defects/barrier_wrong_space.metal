// Exchange through device memory; the barrier orders threadgroup memory only.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device float* scratch [[buffer(4)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]]) {
  scratch[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = scratch[g * 128 + 127 - t];  // DEFECT race-read-after-write
}
