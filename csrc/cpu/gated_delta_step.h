// A whole Gated DeltaNet for one token of one key head and its value heads.
#pragma once

#include "cpu/gated_delta_prepare.h"
#include "cpu/gated_delta_scan.h"
#include "cpu/gated_norm.h"

namespace qwen_metal {

// One batch row.
struct StepRow {
  DeltaConstants w;
  // One row each; `conv_state` (taps - 1, channels) or null data for zeros.
  FloatRows qkv, z, a, b, conv_state;
  // False for padding: its token is a zero, and the state stays as it is.
  bool live;
  // True past the row's length: the window stays as it is too.
  bool ended;
  // (Dv), float32.
  const float* norm;
  float eps;
  // (Hv, Dv, Dk); `state` may be null (zeros) or `state_out`.
  const float* state;
  float* state_out;
  // The window after the token, (taps - 1, channels), and y (Hv, Dv).
  void *window_out, *y;
};

namespace {

// Floats of scratch a key head needs.
inline int64_t step_scratch(const DeltaSizes& s) { return 2 * s.Dk + 3 * s.Dv; }

inline void step(const StepRow& row, int key_head, float* scratch) {
  const DeltaSizes& s = row.w.size;
  const int keys = s.Hk * s.Dk, group = s.Hv / s.Hk, channels = channels_of(s);
  const Float type = row.qkv.type;
  const void* window[max_taps];
  for (int t = 0; t + 1 < s.taps; ++t) {
    window[t] = row.conv_state.data ? at(row.conv_state, t, 0) : nullptr;
  }
  window[s.taps - 1] = row.live ? row.qkv.data : nullptr;

  const auto keep_window = [&](int first, int count) {
    const int64_t width = size_of(type);
    for (int t = 1; t < s.taps; ++t) {
      char* to = (char*)row.window_out + (int64_t(t - 1) * channels + first) * width;
      const char* from = (const char*)window[row.ended ? t - 1 : t];
      from ? std::memcpy(to, from + first * width, count * width) : std::memset(to, 0, count * width);
    }
  };

  float *q = scratch, *k = q + s.Dk, *v = k + s.Dk, *y = v + s.Dv, *z = y + s.Dv;
  keep_window(key_head * s.Dk, s.Dk);
  keep_window(keys + key_head * s.Dk, s.Dk);
  if (row.live) {
    convolve(row.w, window, type, key_head * s.Dk, s.Dk, q);
    convolve(row.w, window, type, keys + key_head * s.Dk, s.Dk, k);
    normalize(q, s.Dk, 1.0f / __builtin_sqrtf(float(s.Dk)), qk_eps);
    normalize(k, s.Dk, 1.0f, qk_eps);
  }

  for (int h = key_head * group; h < (key_head + 1) * group; ++h) {
    const int first = 2 * keys + h * s.Dv;
    const int64_t place = int64_t(h) * s.Dv * s.Dk;
    keep_window(first, s.Dv);
    if (row.live) {
      convolve(row.w, window, type, first, s.Dv, v);
      const float g = decay_of(row.w, h, load_float(row.a.data, row.a.type, h));
      const float beta = beta_of(load_float(row.b.data, row.b.type, h));
      const float* state = row.state ? row.state + place : nullptr;
      scan_token(q, k, v, g, beta, state, row.state_out + place, s.Dk, s.Dv, y);
      to_float(row.z, 0, h * s.Dv, s.Dv, z);
      gated_norm_row(y, z, row.norm, s.Dv, row.eps);
    } else {
      std::memset(y, 0, s.Dv * sizeof(float));
      const int64_t bytes = int64_t(s.Dv) * s.Dk * sizeof(float);
      if (!row.state) {
        std::memset(row.state_out + place, 0, bytes);
      } else if (row.state != row.state_out) {
        std::memcpy(row.state_out + place, row.state + place, bytes);
      }
    }
    from_float(y, s.Dv, type, (char*)row.y + int64_t(h) * s.Dv * size_of(type));
  }
}

}  // namespace
}  // namespace qwen_metal
