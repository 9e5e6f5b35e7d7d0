// Two threads of a threadgroup write one element.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  out[i / 2] = x[i];  // DEFECT race-write-write
}
