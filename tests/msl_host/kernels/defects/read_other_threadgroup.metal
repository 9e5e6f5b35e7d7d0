// Reads what another threadgroup of the same launch wrote.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device float* scratch [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  scratch[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = i < 128 ? 0.0f : scratch[i - 128];  // DEFECT race-read-after-write
}
