// A private array of four, indexed up to seven.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float table[4] = {1, 2, 3, 4};
  out[i] = x[i] * table[i & 7];  // DEFECT array-index private-out-of-bounds
}
