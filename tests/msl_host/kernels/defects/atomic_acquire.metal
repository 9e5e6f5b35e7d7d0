// Metal's atomic operations are relaxed; this compiles nowhere but here.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  uint seen = atomic_load_explicit(&count[0], memory_order_acquire);  // DEFECT atomic-order
  out[i] = x[i] + seen;
}
