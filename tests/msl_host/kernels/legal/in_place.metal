// A thread reads and writes its own element, several times.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  out[i] = x[i];
  for (int step = 0; step < 3; step++) out[i] = out[i] * 2 + 1;
}
