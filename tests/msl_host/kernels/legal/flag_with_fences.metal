// Threadgroups hand data over with a fence on either side of the flag.
// run: resident=4
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device float* scratch [[buffer(4)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]]) {
  scratch[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  if (t == 0) {
    atomic_thread_fence(mem_flags::mem_device, memory_order_release, thread_scope_device);
    atomic_store_explicit(&count[g], 1u, memory_order_relaxed);
  }
  uint from = g ^ 1;
  if (t == 0) {
    while (atomic_load_explicit(&count[from], memory_order_relaxed) == 0) {
    }
    atomic_thread_fence(mem_flags::mem_device, memory_order_acquire, thread_scope_device);
  }
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = scratch[from * 128 + t];
}
