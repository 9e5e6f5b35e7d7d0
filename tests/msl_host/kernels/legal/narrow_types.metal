// bfloat and half, and bytes next to each other written by different threads.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup uchar bytes[128];
  threadgroup bfloat words[128];
  bytes[t] = uchar(t);
  words[t] = bfloat(x[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  half h = half(bytes[127 - t]);
  out[i] = float(h) + float(words[127 - t]);
}
