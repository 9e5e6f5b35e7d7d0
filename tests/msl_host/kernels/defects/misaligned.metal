// A pair read from an address that is not a multiple of eight.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  const device float2* pairs = (const device float2*)(x + 1);
  out[i] = i < 128 ? pairs[i].x : 0.0f;  // DEFECT misaligned
}
