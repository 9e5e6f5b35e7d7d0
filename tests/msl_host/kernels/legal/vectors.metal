// Aligned and packed vectors, with padding nobody set.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device float* scratch [[buffer(4)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  float4 v = ((const device float4*)x)[i & 127];
  float3 three = v.xyz + v.yzw;
  device float3* stored = (device float3*)scratch;
  threadgroup float3 tile[128];
  tile[t] = three;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < 64) stored[i] = tile[t ^ 1];
  if (i < 64) stored[i + 64] = stored[i];
  if (i < 64) three = stored[i + 64];
  packed_float3 tight = three.zyx;
  out[i] = tight[0] + float2(v.xw).y;
}
