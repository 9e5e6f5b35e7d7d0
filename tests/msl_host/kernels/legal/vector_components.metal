// Neighbours write different components of one vector, and packed vectors are made from scalars.
// run: grid=256 threadgroup=64 size=512
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    device float4* out [[buffer(0)]],
    device float* scratch [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  if (i % 2)
    out[i / 2].xy = float2(i);
  else
    out[i / 2].zw = float2(i);
  *(device packed_float2*)(scratch + i * 2) = packed_float2(float(i), 1.0f);
}
