// An index far past one buffer must not be taken for another buffer.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = x[i + 32768];  // DEFECT device-out-of-bounds
}
