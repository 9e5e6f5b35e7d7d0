// More threadgroup memory than Metal allows.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[9000];  // DEFECT threadgroup-memory-size
  tile[t] = x[i];
  out[i] = tile[t];
}
