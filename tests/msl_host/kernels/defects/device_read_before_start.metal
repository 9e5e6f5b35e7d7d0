// The first thread reads before the buffer.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  int left = int(i) - 1;
  out[i] = x[left];  // DEFECT device-out-of-bounds
}
