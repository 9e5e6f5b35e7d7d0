// The last threadgroup sums what the others wrote, with fences around the counter.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device float* scratch [[buffer(4)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]]) {
  threadgroup bool last;
  scratch[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  if (t == 0) {
    atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel, thread_scope_device);
    last = atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed) == groups - 1;
    atomic_thread_fence(mem_flags::mem_device, memory_order_acq_rel, thread_scope_device);
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  if (!last) return;
  float sum = 0;
  for (uint other = 0; other < groups; other++) sum += scratch[other * 128 + t];
  out[t] = sum;
}
