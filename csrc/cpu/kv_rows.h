// Keys or values of one KV head, float or affine-quantised, as float32 rows.
#pragma once

#include "cpu/convert.h"

namespace qwen_metal {

// Strides are elements of each array from one position to the next.
struct KVHead {
  const void* data;
  int64_t stride;
  // Of the data, or of scales and biases when bits is not 0.
  Float type;
  // 0 for float, or 2, 4, 8: `data` is then packed bytes, `stride` bytes.
  int bits, group;
  const void *scales, *biases;
  int64_t scale_stride, bias_stride;
};

namespace {

// One row of codes times scale plus bias.
inline void dequantise_row(const KVHead& kv, int64_t position, int D, float* to) {
  const auto* codes = (const uint8_t*)kv.data + position * kv.stride;
  for (int g = 0; g * kv.group < D; ++g) {
    const Vec scale = Vec::of(load_float(kv.scales, kv.type, position * kv.scale_stride + g));
    const Vec bias = Vec::of(load_float(kv.biases, kv.type, position * kv.bias_stride + g));
    for (int i = g * kv.group; i < (g + 1) * kv.group; i += Vec::width) {
      Vec code;
      if (kv.bits == 8) {
        code = Vec::load_u8(codes + i);
      } else if (kv.bits == 4) {
        code = load_u4(codes + i / 2);
      } else {
        uint8_t single[Vec::width];
        for (int j = 0; j < Vec::width; ++j) single[j] = codes[(i + j) / 4] >> (2 * ((i + j) % 4)) & 3;
        code = Vec::load_u8(single);
      }
      fma(code, scale, bias).store(to + i);
    }
  }
}

// Positions [first, first + count) as rows of D floats: a pointer into the
// data itself when it is float32, else to `scratch` (count, D), filled.
inline const float* float_rows(
    const KVHead& kv, int64_t first, int count, int D, float* scratch, int64_t& stride) {
  if (kv.bits == 0 && kv.type == Float::f32) {
    stride = kv.stride;
    return (const float*)kv.data + first * kv.stride;
  }
  stride = D;
  for (int t = 0; t < count; ++t) {
    float* to = scratch + int64_t(t) * D;
    if (kv.bits) {
      dequantise_row(kv, first + t, D, to);
    } else {
      to_float((const uint16_t*)kv.data + (first + t) * kv.stride, kv.type, D, to);
    }
  }
  return scratch;
}

// Brings the bytes of positions [first, first + count) closer, while others are in work.
inline void prefetch_rows(const KVHead& kv, int64_t first, int count, int D) {
  const int64_t width = kv.bits ? D * kv.bits / 8 : D * size_of(kv.type);
  const int64_t step = kv.bits ? kv.stride : kv.stride * size_of(kv.type);
  for (int t = 0; t < count; ++t) {
    const char* p = (const char*)kv.data + (first + t) * step;
    for (int64_t i = 0; i < width; i += 64) __builtin_prefetch(p + i, 0, 2);
  }
}

}  // namespace
}  // namespace qwen_metal
