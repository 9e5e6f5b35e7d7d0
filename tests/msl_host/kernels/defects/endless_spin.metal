// Waits for a flag that nobody sets.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  while (atomic_load_explicit(&count[1], memory_order_relaxed) == 0) {  // DEFECT endless-spin
  }
  out[i] = x[i];
}
