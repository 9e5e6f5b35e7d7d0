// Reads lanes that do not take part.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  float v = x[i];
  if (lane < 16) v = simd_shuffle_xor(v, 16);  // DEFECT simd-inactive-lane
  out[i] = v;
}
