// An integer divided by zero.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    const constant int& n [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = x[i] * (8 / (n - 512));  // DEFECT division-by-zero
}
