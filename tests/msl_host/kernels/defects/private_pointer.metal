// A private array read past its end in a function that takes a pointer.
#include <metal_stdlib>
using namespace metal;

inline float pick(thread const float* table, uint j) {
  return table[j];  // DEFECT private-out-of-bounds
}

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float table[4] = {1, 2, 3, 4};
  out[i] = x[i] * pick(table, i & 7);
}
