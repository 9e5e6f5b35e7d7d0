// A pointer to a variable of a function that has returned.
#include <metal_stdlib>
using namespace metal;

__attribute__((noinline)) thread float* squares(uint n) {
  float a[4];
  for (uint j = 0; j < 4; j++) a[(j + n) % 4] = j * j;
  thread float* p = a;
  return p;
}

[[kernel]] void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = squares(i)[i % 4];  // DEFECT private-out-of-bounds
}
