// A matrix operation with half of the lanes.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8>(1.0f);
  simdgroup_float8x8 b = make_filled_simdgroup_matrix<float, 8>(x[0]);
  simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8>(0.0f);
  if (lane < 16) simdgroup_multiply_accumulate(c, a, b, c);  // DEFECT simd-inactive-lane
  out[i] = c.thread_elements()[0];
}
