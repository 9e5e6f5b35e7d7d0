// All lanes read an element that their last one then overwrites: another lane read it last but one.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float first[4];
  if (lane == 0) first[t / 32] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float v = first[t / 32];
  if (lane == 31) first[t / 32] = 2 * v;  // DEFECT race-write-after-read
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = v + first[t / 32];
}
