// Counters in threadgroup memory that nobody set to zero.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint counts[8];
  atomic_fetch_add_explicit(&counts[t & 7], 1u, memory_order_relaxed);  // DEFECT uninitialised-threadgroup
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = x[i] + atomic_load_explicit(&counts[t & 7], memory_order_relaxed);
}
