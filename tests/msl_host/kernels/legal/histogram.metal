// Atomic counters in threadgroup and then in device memory.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint local_count[8];
  if (t < 8) atomic_store_explicit(&local_count[t], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&local_count[uint(x[i]) & 7], 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 8) {
    uint mine = atomic_load_explicit(&local_count[t], memory_order_relaxed);
    atomic_fetch_add_explicit(&count[t], mine, memory_order_relaxed);
  }
  out[i] = x[i];
}
