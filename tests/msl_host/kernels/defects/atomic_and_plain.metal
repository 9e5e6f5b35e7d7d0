// A counter read without an atomic load while other threads still add.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);  // DEFECT race-write-after-read
  device uint* plain = (device uint*)count;
  out[i] = x[i] + plain[0];  // DEFECT race-read-after-write
}
