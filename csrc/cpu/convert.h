// Rows of any float type to and from float32.
#pragma once

#include "cpu/lanes.h"

namespace qwen_metal {

// A float array whose rows are contiguous, `stride` elements apart.
struct FloatRows {
  const void* data;
  Float type;
  int64_t stride;
};

namespace {

inline const void* at(const FloatRows& rows, int64_t row, int64_t column) {
  return (const char*)rows.data + (row * rows.stride + column) * size_of(rows.type);
}

// The first `count` (below a whole vector) elements at p, the rest zero.
inline Vec load_some(const float* p, int count) {
  float whole[Vec::width] = {};
  std::memcpy(whole, p, count * sizeof(float));
  return Vec::load(whole);
}

inline void store_some(Vec x, float* p, int count) {
  float whole[Vec::width];
  x.store(whole);
  std::memcpy(p, whole, count * sizeof(float));
}

// `count` elements at `from` as float32.
inline void to_float(const void* from, Float type, size_t count, float* to) {
  if (type == Float::f32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto load = type == Float::bf16 ? Vec::load_bf16 : Vec::load_f16;
  auto p = (const uint16_t*)from;
  size_t i = 0;
  for (; i + Vec::width <= count; i += Vec::width) load(p + i).store(to + i);
  if (i < count) {
    uint16_t rest[Vec::width] = {};
    std::memcpy(rest, p + i, (count - i) * sizeof(uint16_t));
    store_some(load(rest), to + i, int(count - i));
  }
}

inline void from_float(const float* from, size_t count, Float type, void* to) {
  if (type == Float::f32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  auto store = [type](Vec x, uint16_t* p) {
    type == Float::bf16 ? store_bf16(x, p) : store_f16(x, p);
  };
  auto p = (uint16_t*)to;
  size_t i = 0;
  for (; i + Vec::width <= count; i += Vec::width) store(Vec::load(from + i), p + i);
  if (i < count) {
    uint16_t rest[Vec::width];
    store(load_some(from + i, int(count - i)), rest);
    std::memcpy(p + i, rest, (count - i) * sizeof(uint16_t));
  }
}

// `count` elements of a row of `rows` as float32.
inline void to_float(const FloatRows& rows, size_t row, size_t column, size_t count, float* to) {
  to_float(at(rows, row, column), rows.type, count, to);
}

// Sum of a[i] * b[i].
inline float dot(const float* a, const float* b, int count) {
  Vec most = zero();
  int i = 0;
  for (; i + Vec::width <= count; i += Vec::width) most = fma(Vec::load(a + i), Vec::load(b + i), most);
  if (i < count) {
    most = fma(load_some(a + i, count - i), load_some(b + i, count - i), most);
  }
  return sum(most);
}

// x[i] = f(x[i]) for a function of vectors.
template <class F>
inline void apply(float* x, int count, F f) {
  int i = 0;
  for (; i + Vec::width <= count; i += Vec::width) f(Vec::load(x + i)).store(x + i);
  if (i < count) store_some(f(load_some(x + i, count - i)), x + i, count - i);
}

}  // namespace
}  // namespace qwen_metal
