// A struct with padding goes through threadgroup memory, and through an array that stays in memory.
#include <metal_stdlib>
using namespace metal;

struct Item {
  uchar tag;
  float value[4];
  uchar end;
};

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup Item items[128];
  Item kept[3];
  for (int j = 0; j < 3; j++) {
    kept[j].tag = (t + j) & 1;
    for (int l = 0; l < 4; l++) kept[j].value[l] = x[i] * (l + 1);
    kept[j].end = uchar(j);
  }
  items[t] = kept[t % 3];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  kept[i % 3] = items[127 - t];
  Item other = kept[i % 3];
  out[i] = other.tag ? other.value[t & 3] : -other.value[0] - other.end;
}
