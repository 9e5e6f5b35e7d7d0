// An index past one threadgroup array lands where the next one would be.
// run: grid=64 threadgroup=64
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(device float* out [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  threadgroup float a[64];
  threadgroup float b[64];
  a[i] = 1;
  b[i] = 2;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* p = a;
  out[i] = p[i + 80] + b[i];  // DEFECT threadgroup-out-of-bounds
}
