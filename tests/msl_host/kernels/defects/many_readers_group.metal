// Every thread reads an element that the last thread then overwrites, after a barrier of its SIMD-group only.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup float first[1];
  if (t == 0) first[0] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float v = first[0];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 127) first[0] = 2 * v;  // DEFECT race-write-after-read
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = v + first[0];
}
