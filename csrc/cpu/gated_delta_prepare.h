// Causal depthwise convolution, SiLU, q/k norm and gates, a token at a time.
#pragma once

#include <cmath>

#include "cpu/convert.h"

namespace qwen_metal {

// Small weights and sizes of a Gated DeltaNet. Channels stand as q, k, v.
constexpr int max_taps = 64;

struct DeltaSizes {
  int Hk, Hv, Dk, Dv, taps;
  bool operator==(const DeltaSizes&) const = default;
};

struct DeltaConstants {
  DeltaSizes size;
  // (channels, taps).
  const void* conv;
  Float conv_type;
  // (Hv) each.
  const void *A_log, *dt_bias;
  Float A_log_type, dt_bias_type;
};

namespace {

inline int channels_of(const DeltaSizes& s) { return 2 * s.Hk * s.Dk + s.Hv * s.Dv; }

// Channels worked on at a time: their taps and window stay in registers.
constexpr int conv_block = 64;

// silu(sum over taps of window[t] * conv[c, t]) for channels [first, first + count).
// `window[t]` is the row of tap t, or null for a row of zeros.
inline void convolve(
    const DeltaConstants& w, const void* const* window, Float type, int first, int count,
    float* out) {
  const int taps = w.size.taps, width = int(size_of(type));
  float weights[conv_block * 4], row[conv_block];
  for (int c = 0; c < count; c += conv_block) {
    const int n = count - c < conv_block ? count - c : conv_block;
    float* sum = out + c;
    std::memset(sum, 0, n * sizeof(float));
    for (int t0 = 0; t0 < taps; t0 += 4) {  // four taps at a time; the model has four
      const int here = taps - t0 < 4 ? taps - t0 : 4;
      if (here == 4 && taps == 4) {
        const auto* p = (const char*)w.conv + int64_t(first + c) * 4 * size_of(w.conv_type);
        to_float(p, w.conv_type, n * 4, weights);
      } else {
        for (int i = 0; i < n; ++i) {
          for (int t = 0; t < here; ++t) {
            weights[4 * i + t] =
                load_float(w.conv, w.conv_type, int64_t(first + c + i) * taps + t0 + t);
          }
        }
      }
      for (int t = 0; t < here; ++t) {
        if (!window[t0 + t]) continue;
        to_float((const char*)window[t0 + t] + int64_t(first + c) * width, type, n, row);
        for (int i = 0; i < n; ++i) sum[i] += row[i] * weights[4 * i + t];
      }
    }
    apply(sum, n, [](Vec x) { return silu(x); });
  }
}

// x * factor / sqrt(sum of x^2 + eps).
inline void normalize(float* x, int count, float factor, float eps) {
  const Vec scale = Vec::of(factor / __builtin_sqrtf(dot(x, x, count) + eps));
  apply(x, count, [scale](Vec a) { return a * scale; });
}

// mlx-lm's epsilon of the q/k norm, added to the sum of squares.
constexpr float qk_eps = 1e-6f;

// exp(-exp(A_log) softplus(a + dt_bias)) of one head.
inline float decay_of(const DeltaConstants& w, int head, float a) {
  const float x = a + load_float(w.dt_bias, w.dt_bias_type, head);
  const float softplus = (x > 0 ? x : 0) + ::log1pf(::expf(x > 0 ? -x : x));
  return ::expf(-::expf(load_float(w.A_log, w.A_log_type, head)) * softplus);
}

inline float beta_of(float b) { return 1.0f / (1.0f + ::expf(-b)); }

}  // namespace

// One batch row of T tokens.
struct PrepareRow {
  DeltaConstants w;
  // (T, channels) and (T, Hv); `conv_state` (taps - 1, channels) or null data.
  FloatRows qkv, a, b, conv_state;
  // (T) or null.
  const bool* live;
  int tokens;
  float *q, *k, *v, *g, *beta;
};

namespace {

// Tokens [first, last) of a row.
inline void prepare(const PrepareRow& row, int first, int last) {
  const DeltaSizes& s = row.w.size;
  const int keys = s.Hk * s.Dk, values = s.Hv * s.Dv;
  const float q_scale = 1.0f / __builtin_sqrtf(float(s.Dk));
  for (int t = first; t < last; ++t) {
    const void* window[max_taps];
    for (int tap = 0; tap < s.taps; ++tap) {
      const int from = t - (s.taps - 1) + tap;
      if (from >= 0) {
        window[tap] = row.live && !row.live[from] ? nullptr : at(row.qkv, from, 0);
      } else {
        window[tap] = row.conv_state.data ? at(row.conv_state, from + s.taps - 1, 0) : nullptr;
      }
    }
    float *q = row.q + int64_t(t) * keys, *k = row.k + int64_t(t) * keys;
    convolve(row.w, window, row.qkv.type, 0, keys, q);
    convolve(row.w, window, row.qkv.type, keys, keys, k);
    convolve(row.w, window, row.qkv.type, 2 * keys, values, row.v + int64_t(t) * values);
    for (int h = 0; h < s.Hk; ++h) {
      normalize(q + h * s.Dk, s.Dk, q_scale, qk_eps);
      normalize(k + h * s.Dk, s.Dk, 1.0f, qk_eps);
    }
    for (int h = 0; h < s.Hv; ++h) {
      const int64_t i = int64_t(t) * s.Hv + h;
      row.g[i] = decay_of(row.w, h, load_float(at(row.a, t, h), row.a.type, 0));
      row.beta[i] = beta_of(load_float(at(row.b, t, h), row.b.type, 0));
    }
  }
}

}  // namespace
}  // namespace qwen_metal
