// A private array of which only the part that is set is read.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float v[8];
  for (uint j = 0; j <= (i & 7); j++) v[j] = x[i] * j;
  float sum = 0;
  for (uint j = 0; j <= (i & 7); j++) sum += v[j];
  out[i] = sum;
}
