// Attention of one token over its keys and values, a KV head's query heads together.
#pragma once

#include <cmath>

#include "cpu/kv_rows.h"

namespace qwen_metal {

// The query heads of one KV head, over positions [first, last).
struct DecodePart {
  KVHead keys, values;
  int64_t first, last;
  int heads, D;
  // (heads, D), multiplied by the scale.
  const float* q;
  // Unnormalised: the sum of exp(score - most) v, (heads, D), and per head
  // the greatest score and the sum of exp(score - most).
  float *sum, *most, *weight;
};

// The gate of one head before its sigmoid, (D), or null.
struct HeadGate {
  const void* data;
  Float type;
};

namespace {

// Positions of a block: its keys as float32 stay in the first-level cache.
constexpr int decode_block = 32;

// Floats of scratch.
inline int64_t decode_scratch(int heads, int D) { return int64_t(decode_block) * (D + heads); }

// scores[h][t] = q[h] . key[t] for a tile of lanes/4 heads and 4 positions.
// Heads and positions beyond the last are the last again.
inline void score_tile(
    const float* q, int head, int heads, const float* keys, int64_t stride, int t, int count,
    int D, float* scores) {
  constexpr int H = Vec::width / 4;
  const float *query[H], *key[4];
  for (int h = 0; h < H; ++h) query[h] = q + int64_t(head + h < heads ? head + h : heads - 1) * D;
  for (int j = 0; j < 4; ++j) key[j] = keys + (t + j < count ? t + j : count - 1) * stride;
  Vec sum[Vec::width];
  for (Vec& x : sum) x = zero();
  for (int i = 0; i < D; i += Vec::width) {
    Vec k[4];
    for (int j = 0; j < 4; ++j) k[j] = Vec::load(key[j] + i);
    for (int h = 0; h < H; ++h) {
      const Vec x = Vec::load(query[h] + i);
      for (int j = 0; j < 4; ++j) sum[4 * h + j] = fma(x, k[j], sum[4 * h + j]);
    }
  }
  float whole[Vec::width];
  sums_of(sum).store(whole);
  for (int h = 0; h < H && head + h < heads; ++h) {
    std::memcpy(scores + (head + h) * decode_block + t, whole + 4 * h, 4 * sizeof(float));
  }
}

// sum[h] += weights[h][t] * values[t] for lanes/4 heads and C vectors from column i.
// A head beyond the last is the last again: the same sum, stored twice.
template <int C>
inline void value_tile(
    const float* weights, int head, int heads, const float* values, int64_t stride, int count,
    int D, int i, float* sum) {
  constexpr int H = Vec::width / 4;
  Vec total[H][C];
  const float* weight[H];
  float* to[H];
  for (int h = 0; h < H; ++h) {
    const int own = head + h < heads ? head + h : heads - 1;
    weight[h] = weights + own * decode_block;
    to[h] = sum + int64_t(own) * D + i;
    for (int c = 0; c < C; ++c) total[h][c] = Vec::load(to[h] + c * Vec::width);
  }
  for (int t = 0; t < count; ++t) {
    Vec v[C];
    for (int c = 0; c < C; ++c) v[c] = Vec::load(values + t * stride + i + c * Vec::width);
    for (int h = 0; h < H; ++h) {
      const Vec w = Vec::of(weight[h][t]);
      for (int c = 0; c < C; ++c) total[h][c] = fma(w, v[c], total[h][c]);
    }
  }
  for (int h = 0; h < H; ++h)
    for (int c = 0; c < C; ++c) total[h][c].store(to[h] + c * Vec::width);
}

// Softmax weights of a row of `count` scores against the running maximum:
// scores become exp(score - most); returns what the sums so far must be
// multiplied by.
inline float running_softmax(float* scores, int count, int room, float& most, float& weight) {
  for (int t = count; t < room; ++t) scores[t] = -__builtin_inff();
  Vec highest = Vec::load(scores);
  for (int t = Vec::width; t < room; t += Vec::width) highest = max(highest, Vec::load(scores + t));
  const float before = most, now = largest(highest);
  most = now > before ? now : before;
  for (int t = 0; t < room; t += Vec::width) {
    exp(Vec::load(scores + t) - Vec::of(most)).store(scores + t);
  }
  for (int t = count; t < room; ++t) scores[t] = 0.0f;
  Vec total = zero();
  for (int t = 0; t < room; t += Vec::width) total = total + Vec::load(scores + t);
  const float factor = before == most ? 1.0f : ::expf(before - most);
  weight = weight * factor + sum(total);
  return factor;
}

inline void decode(const DecodePart& part, float* scratch) {
  const int D = part.D, heads = part.heads;
  float* rows = scratch;
  float* scores = scratch + int64_t(decode_block) * D;
  std::memset(part.sum, 0, size_t(heads) * D * sizeof(float));
  for (int h = 0; h < heads; ++h) part.most[h] = -__builtin_inff(), part.weight[h] = 0.0f;
  for (int64_t first = part.first; first < part.last; first += decode_block) {
    const int count = int(part.last - first < decode_block ? part.last - first : decode_block);
    const int64_t next = first + count;
    const int ahead = int(part.last - next < decode_block ? part.last - next : decode_block);
    int64_t stride;
    const float* keys = float_rows(part.keys, first, count, D, rows, stride);
    prefetch_rows(part.values, first, count, D);
    for (int t = 0; t < count; t += 4) {
      for (int h = 0; h < heads; h += Vec::width / 4) {
        score_tile(part.q, h, heads, keys, stride, t, count, D, scores);
      }
    }
    for (int h = 0; h < heads; ++h) {
      const float factor = running_softmax(
          scores + h * decode_block, count, decode_block, part.most[h], part.weight[h]);
      if (factor != 1.0f) {
        apply(part.sum + int64_t(h) * D, D, [=](Vec x) { return x * Vec::of(factor); });
      }
    }
    const float* values = float_rows(part.values, first, count, D, rows, stride);
    prefetch_rows(part.keys, next, ahead, D);
    int i = 0;
    for (; i + 4 * Vec::width <= D; i += 4 * Vec::width) {
      for (int h = 0; h < heads; h += Vec::width / 4) {
        value_tile<4>(scores, h, heads, values, stride, count, D, i, part.sum);
      }
    }
    for (; i < D; i += Vec::width) {
      for (int h = 0; h < heads; h += Vec::width / 4) {
        value_tile<1>(scores, h, heads, values, stride, count, D, i, part.sum);
      }
    }
  }
}

// o = sum / weight * sigmoid(gate), in place; a weight of 0 (no key) gives zeros.
inline void finish_head(float* o, float weight, int D, HeadGate gate, float* scratch) {
  const Vec back = Vec::of(weight > 0.0f ? 1.0f / weight : weight == 0.0f ? 0.0f : weight);
  apply(o, D, [back](Vec x) { return x * back; });
  if (!gate.data) return;
  to_float(gate.data, gate.type, D, scratch);
  for (int i = 0; i < D; i += Vec::width) {
    (Vec::load(o + i) * sigmoid(Vec::load(scratch + i))).store(o + i);
  }
}

// Adds up the parts of one head's context: sums (parts, D) at `stride`.
inline void combine_parts(
    const float* sums, const float* most, const float* weight, int parts, int64_t stride,
    int64_t number_stride, int D, HeadGate gate, float* o, float* scratch) {
  float highest = -__builtin_inff(), total = 0.0f;
  for (int p = 0; p < parts; ++p) {
    const float m = most[p * number_stride];
    highest = m > highest || m != m ? m : highest;
  }
  std::memset(o, 0, D * sizeof(float));
  for (int p = 0; p < parts; ++p) {
    if (weight[p * number_stride] == 0.0f) continue;
    const float factor = ::expf(most[p * number_stride] - highest);
    total += factor * weight[p * number_stride];
    const Vec f = Vec::of(factor);
    for (int i = 0; i < D; i += Vec::width) {
      fma(f, Vec::load(sums + p * stride + i), Vec::load(o + i)).store(o + i);
    }
  }
  finish_head(o, total, D, gate, scratch);
}

}  // namespace
}  // namespace qwen_metal
