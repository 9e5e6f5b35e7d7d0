// A grid rounded up to whole threadgroups, and no guard.
// run: grid=512 threadgroup=128 n=500 size=500
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    const constant int& n [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  float v = i < uint(n) ? x[i] : 0;
  out[i] = 2 * v;  // DEFECT device-out-of-bounds
}
