// Casts const away.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  device float* writable = (device float*)x;
  writable[i] = 1;  // DEFECT write-to-input
  out[i] = 0;
}
