// The last thread writes one element too far.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  uint to = i + (i == 511 ? 1 : 0);
  out[to] = x[i];  // DEFECT device-out-of-bounds
}
