// One element of a private array is missed.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float v[4];
  for (int j = 0; j < 3; j++) v[j] = x[i] + j;
  float sum = 0;
  for (int j = 0; j < 4; j++) sum += v[(j + i) & 3];
  out[i] = sum;  // DEFECT uninitialised-private
}
