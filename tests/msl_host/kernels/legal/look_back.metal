// A running sum over threadgroups: each waits for the one before.
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
  float total = simd_sum(x[i]);
  threadgroup float parts[4];
  if (t % 32 == 0) parts[t / 32] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) {
    float before = 0;
    if (g > 0) {
      while (atomic_load_explicit(&count[g - 1], memory_order_relaxed) == 0) {
      }
      atomic_thread_fence(mem_flags::mem_device, memory_order_acquire, thread_scope_device);
      before = scratch[g - 1];
    }
    scratch[g] = before + parts[0] + parts[1] + parts[2] + parts[3];
    atomic_thread_fence(mem_flags::mem_device, memory_order_release, thread_scope_device);
    atomic_store_explicit(&count[g], 1u, memory_order_relaxed);
  }
  out[i] = total;
}
