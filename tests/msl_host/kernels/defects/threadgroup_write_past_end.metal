// A write beyond a threadgroup array, through a pointer.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  threadgroup float* to = tile + t + (t == 127 ? 1 : 0);
  *to = x[i];  // DEFECT threadgroup-out-of-bounds
  out[i] = *to;
}
