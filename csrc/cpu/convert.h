// Rows of any float type to and from float32.
#pragma once

#include "cpu/dtype.h"
#include "cpu/vec.h"

namespace qwen_metal::cpu {

/// A float array whose rows are contiguous, ``stride`` elements apart.
struct Rows {
  const void* data;
  Float type;
  int64_t stride;
};

namespace {

inline const void* at(const Rows& rows, int64_t row, int64_t column) {
  return (const char*)rows.data + (row * rows.stride + column) * size_of(rows.type);
}

/// The first ``count`` (below a whole vector) elements at p, the rest zero.
template <class V>
inline V load_some(const float* p, int count) {
  float whole[V::lanes] = {};
  memcpy(whole, p, count * sizeof(float));
  return V::load(whole);
}

template <class V>
inline void store_some(V x, float* p, int count) {
  float whole[V::lanes];
  x.store(whole);
  memcpy(p, whole, count * sizeof(float));
}

/// ``count`` elements at ``from`` as float32.
template <class V>
inline void to_float(const void* from, Float type, size_t count, float* to) {
  if (type == Float::f32) {
    memcpy(to, from, count * sizeof(float));
    return;
  }
  auto load = type == Float::bf16 ? V::load_bf16 : V::load_f16;
  auto p = (const uint16_t*)from;
  size_t i = 0;
  for (; i + V::lanes <= count; i += V::lanes) load(p + i).store(to + i);
  if (i < count) {
    uint16_t rest[V::lanes] = {};
    memcpy(rest, p + i, (count - i) * sizeof(uint16_t));
    store_some(load(rest), to + i, int(count - i));
  }
}

template <class V>
inline void from_float(const float* from, size_t count, Float type, void* to) {
  if (type == Float::f32) {
    memcpy(to, from, count * sizeof(float));
    return;
  }
  auto store = [type](V x, uint16_t* p) {
    type == Float::bf16 ? x.store_bf16(p) : x.store_f16(p);
  };
  auto p = (uint16_t*)to;
  size_t i = 0;
  for (; i + V::lanes <= count; i += V::lanes) store(V::load(from + i), p + i);
  if (i < count) {
    uint16_t rest[V::lanes];
    store(load_some<V>(from + i, int(count - i)), rest);
    memcpy(p + i, rest, (count - i) * sizeof(uint16_t));
  }
}

/// ``count`` elements of a row of ``rows`` as float32.
template <class V>
inline void to_float(const Rows& rows, size_t row, size_t column, size_t count, float* to) {
  to_float<V>(at(rows, row, column), rows.type, count, to);
}

/// Sum of a[i] * b[i].
template <class V>
inline float dot(const float* a, const float* b, int count) {
  V most = V::zero();
  int i = 0;
  for (; i + V::lanes <= count; i += V::lanes) most = V::fma(V::load(a + i), V::load(b + i), most);
  if (i < count) {
    most = V::fma(load_some<V>(a + i, count - i), load_some<V>(b + i, count - i), most);
  }
  return most.sum();
}

/// x[i] = f(x[i]) for a function of vectors.
template <class V, class F>
inline void apply(float* x, int count, F f) {
  int i = 0;
  for (; i + V::lanes <= count; i += V::lanes) f(V::load(x + i)).store(x + i);
  if (i < count) store_some(f(load_some<V>(x + i, count - i)), x + i, count - i);
}

}  // namespace
}  // namespace qwen_metal::cpu
