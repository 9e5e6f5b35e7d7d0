// Products of 8x8 matrices, loaded from and stored to both memories.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float tile[4][64];
  simdgroup_float8x8 a, b, c = simdgroup_float8x8(1.0f);
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x + 64 * simd, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, tile[simd], 8);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[t / 32][lane * 2 + 1];
}
