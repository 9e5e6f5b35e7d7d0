// Aligned and packed vectors, with padding nobody set.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device float* scratch [[buffer(4)]],
    uint i [[thread_position_in_grid]]) {
  float4 v = ((const device float4*)x)[i & 127];
  float3 three = v.xyz + v.yzw;
  if (i < 128) ((device float3*)scratch)[i] = three;
  packed_float3 tight = three.zyx;
  out[i] = tight[0] + float2(v.xw).y;
}
