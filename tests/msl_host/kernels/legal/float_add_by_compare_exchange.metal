// An atomic addition of floats by compare and exchange.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    device atomic_uint* count [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  device atomic_uint* sum = count + 2;
  uint seen = atomic_load_explicit(sum, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(
      sum, &seen, as_type<uint>(as_type<float>(seen) + x[i]), memory_order_relaxed, memory_order_relaxed)) {
  }
  out[i] = x[i];
}
