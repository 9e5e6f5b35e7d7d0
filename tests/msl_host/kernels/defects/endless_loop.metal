// A loop that never ends and touches no atomic variable.
// run: time_limit=0.5
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    const constant int& n [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  float v = x[i];
  for (uint step = 1; step != 0; step += 2) v = v * 0.5f + x[step & 255];  // DEFECT time-limit
  out[i] = v;
}
