// Waits for a threadgroup that does not run at the same time.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]]) {
  if (t == 0) atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
  while (atomic_load_explicit(&count[0], memory_order_relaxed) < groups) {  // DEFECT endless-spin
  }
  out[i] = x[i];
}
