// Threadgroup memory sized by the host.
// run: threadgroup_bytes=512
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    threadgroup float* shared [[threadgroup(0)]]) {
  shared[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[127 - t];
}
