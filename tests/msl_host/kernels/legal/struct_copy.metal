// A struct with padding goes through threadgroup memory.
#include <metal_stdlib>
using namespace metal;

struct Item {
  uchar tag;
  float value;
};

[[kernel]] void k(
    const device float* x [[buffer(0)]],
    device float* out [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  threadgroup Item items[128];
  Item mine;
  mine.tag = t & 1;
  mine.value = x[i];
  items[t] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Item other = items[127 - t];
  out[i] = other.tag ? other.value : -other.value;
}
