// RMSNorm and rotary embedding of one token's heads.
#pragma once

#include <cmath>

#include "cpu/convert.h"

namespace qwen_metal {

// `tokens` heads of D, each normalised and rotated.
struct RopeToken {
  // Angle of pair i at this token: cosine and sine, (dims / 2) each.
  const float *cosine, *sine;
  int D, dims;
};

namespace {

// Angles position * scale * base^(-2 i / dims). The product is formed in
// double: at position 32,000 a float32 angle is off by 1e-3.
inline void rope_angles(
    double position, double scale, double log_base, int dims, float* cosine, float* sine) {
  constexpr double turn = 6.283185307179586;
  for (int i = 0; i < dims / 2; ++i) {
    double angle = position * scale * ::exp(-log_base * (2.0 * i / dims));
    angle -= turn * __builtin_rint(angle / turn);
    cosine[i] = ::cosf(float(angle)), sine[i] = ::sinf(float(angle));
  }
}

// One head, in place: rms norm with `weight` (D), then pairs (i, i + dims / 2) rotated.
inline void prepare_head(const RopeToken& rope, const float* weight, float eps, float* x) {
  const int D = rope.D, half = rope.dims / 2;
  const float scale = 1.0f / __builtin_sqrtf(dot(x, x, D) / D + eps);
  for (int i = 0; i < D; ++i) x[i] = x[i] * scale * weight[i];
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * rope.cosine[i] - b * rope.sine[i];
    x[i + half] = a * rope.sine[i] + b * rope.cosine[i];
  }
}

}  // namespace
}  // namespace qwen_metal
