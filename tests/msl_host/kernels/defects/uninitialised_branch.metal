// A branch on a variable nobody set.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  int state[2];
  state[i & 1] = 1;
  if (state[(i >> 1) & 1] > 0)  // DEFECT uninitialised-private
    out[i] = x[i];
  else
    out[i] = 0;
}
