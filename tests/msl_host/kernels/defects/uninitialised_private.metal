// A variable that only half of the threads set.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float v;
  if (i < 64) v = x[i];
  out[i] = v;  // DEFECT uninitialised-private
}
