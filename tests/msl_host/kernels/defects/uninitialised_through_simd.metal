// A lane passes on a value it never set.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  float v;
  if (lane != 7) v = x[i];
  out[i] = simd_shuffle_xor(v, 1);  // DEFECT uninitialised-private
}
