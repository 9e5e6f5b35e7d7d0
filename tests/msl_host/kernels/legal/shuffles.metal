// Every lane sends and receives.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float v = x[i];
  v += simd_shuffle_down(v, 16);
  v += simd_shuffle_xor(v, 8);
  v += simd_shuffle_rotate_up(v, 3);
  v += simd_broadcast(v, 5) + simd_prefix_exclusive_sum(v) + simd_shuffle_and_fill_up(v, 0.0f, 2);
  out[i] = v;
}
