// No barrier between writing and reading other threads' elements.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[128];
  tile[t] = x[i];  // DEFECT race-write-after-read
  out[i] = tile[127 - t];  // DEFECT race-read-after-write uninitialised-threadgroup
}
