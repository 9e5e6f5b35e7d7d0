// Causal attention of a block of tokens, all query heads of a KV head together.
#pragma once

#include "cpu/gqa_decode.h"

namespace qwen_metal {

// Tokens [first_token, first_token + tokens) of the last `T` of `S` positions.
struct PrefillBlock {
  KVHead keys, values;
  int64_t S, T, start;
  int first_token, tokens, heads, D;
  bool causal;
  float scale;
  // Head h, token t (of all T) of the queries: q + h * q_head + t * q_token elements.
  const void* q;
  Float q_type;
  int64_t q_head, q_token;
  // The same for the gate (null for none) and the output.
  const void* gate;
  Float gate_type;
  int64_t gate_token;
  void* out;
  int64_t out_token;
};

namespace {

// Keys of a block, and rows (a head's token) of a register tile.
constexpr int prefill_keys = 64;
constexpr int tile_rows = Vec::width == 16 ? 12 : 6;

// Rows a block should have: enough for converted keys and values to be reused.
constexpr int prefill_rows = 96;

inline int padded_rows(int rows) {
  return (rows + tile_rows - 1) / tile_rows * tile_rows;
}

// Floats of scratch for `rows` rows.
inline int64_t prefill_scratch(int rows, int D) {
  const int64_t padded = padded_rows(rows);
  return 2 * padded * D + padded * prefill_keys + 2 * int64_t(prefill_keys) * D + 2 * padded;
}

// c (rows, columns) = a (rows, depth) b (depth, columns), or += when `add`.
// rows is a multiple of tile_rows, columns of the lanes.
inline void small_matmul(
    const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
    int rows, int columns, int depth, bool add) {
  constexpr int R = tile_rows;
  const auto tile = [&]<int C>(int row, int column) __attribute__((always_inline)) {
    Vec sum[R][C];
    float* to = c + row * c_stride + column;
    const float* left = a + row * a_stride;
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < C; ++j) {
        sum[r][j] = add ? Vec::load(to + r * c_stride + j * Vec::width) : zero();
      }
    }
    for (int k = 0; k < depth; ++k) {
      Vec right[C];
      for (int j = 0; j < C; ++j) right[j] = Vec::load(b + k * b_stride + column + j * Vec::width);
      for (int r = 0; r < R; ++r) {
        const Vec x = Vec::of(left[r * a_stride + k]);
        for (int j = 0; j < C; ++j) sum[r][j] = fma(x, right[j], sum[r][j]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < C; ++j) sum[r][j].store(to + r * c_stride + j * Vec::width);
  };
  for (int row = 0; row < rows; row += R) {
    int column = 0;
    for (; column + 2 * Vec::width <= columns; column += 2 * Vec::width) {
      tile.template operator()<2>(row, column);
    }
    for (; column < columns; column += Vec::width) tile.template operator()<1>(row, column);
  }
}

// to (D, prefill_keys): column t is row t of `from`; columns from count on are zero.
inline void turn_rows(const float* from, int64_t stride, int count, int D, float* to) {
  constexpr int L = Vec::width;
  for (int t = 0; t < prefill_keys; t += L) {
    for (int i = 0; i < D; i += L) {
      Vec square[L];
      for (int r = 0; r < L; ++r) {
        square[r] = t + r < count ? Vec::load(from + (t + r) * stride + i) : zero();
      }
      transpose(square);
      for (int r = 0; r < L; ++r) square[r].store(to + int64_t(i + r) * prefill_keys + t);
    }
  }
}

inline void prefill(const PrefillBlock& b, float* scratch) {
  const int D = b.D, rows = b.heads * b.tokens, padded = padded_rows(rows);
  float* q = scratch;
  float* o = q + int64_t(padded) * D;
  float* scores = o + int64_t(padded) * D;
  float* kv = scores + int64_t(padded) * prefill_keys;
  float* turned = kv + int64_t(prefill_keys) * D;
  float *most = turned + int64_t(prefill_keys) * D, *weight = most + padded;

  // Row r is token r / heads, so that rows of like positions stand together.
  std::memset(o, 0, size_t(padded) * D * sizeof(float));
  for (int r = 0; r < padded; ++r) {
    most[r] = -__builtin_inff(), weight[r] = 0.0f;
    float* to = q + int64_t(r) * D;
    if (r >= rows) {
      std::memset(to, 0, D * sizeof(float));
      continue;
    }
    const int64_t from = r % b.heads * b.q_head + (b.first_token + r / b.heads) * b.q_token;
    to_float((const char*)b.q + from * size_of(b.q_type), b.q_type, D, to);
    const Vec scale = Vec::of(b.scale);
    apply(to, D, [scale](Vec x) { return x * scale; });
  }

  // The position of the block's first token; row r may see keys up to its own.
  const int64_t position = b.S - b.T + b.first_token;
  const int64_t last = b.causal ? position + b.tokens : b.S;
  for (int64_t first = b.start; first < last; first += prefill_keys) {
    const int count = int(last - first < prefill_keys ? last - first : prefill_keys);
    int64_t stride;
    const float* keys = float_rows(b.keys, first, count, D, kv, stride);
    turn_rows(keys, stride, count, D, turned);
    small_matmul(
        q, D, turned, prefill_keys, scores, prefill_keys, padded, prefill_keys, D, false);
    for (int r = 0; r < rows; ++r) {
      const int64_t sees = b.causal ? position + r / b.heads + 1 - first : count;
      const int own = int(sees < 0 ? 0 : sees < count ? sees : count);
      float* row = scores + int64_t(r) * prefill_keys;
      if (own == 0) {
        std::memset(row, 0, prefill_keys * sizeof(float));
        continue;
      }
      const float factor = running_softmax(row, own, prefill_keys, most[r], weight[r]);
      if (factor != 1.0f) {
        apply(o + int64_t(r) * D, D, [=](Vec x) { return x * Vec::of(factor); });
      }
    }
    for (int r = rows; r < padded; ++r) {
      std::memset(scores + int64_t(r) * prefill_keys, 0, prefill_keys * sizeof(float));
    }
    const float* values = float_rows(b.values, first, count, D, kv, stride);
    small_matmul(scores, prefill_keys, values, stride, o, D, padded, D, count, true);
  }

  for (int r = 0; r < rows; ++r) {
    const int64_t token = b.first_token + r / b.heads, head = r % b.heads;
    HeadGate gate = {nullptr, b.gate_type};
    if (b.gate) {
      gate.data = (const char*)b.gate + (token * b.gate_token + head * D) * size_of(b.gate_type);
    }
    float* row = o + int64_t(r) * D;
    finish_head(row, weight[r], D, gate, scores);
    char* to = (char*)b.out + (token * b.out_token + head * D) * size_of(b.q_type);
    from_float(row, D, b.q_type, to);
  }
}

}  // namespace
}  // namespace qwen_metal
