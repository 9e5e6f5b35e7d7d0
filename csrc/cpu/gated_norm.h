// RMSNorm times SiLU of a gate, over rows.
#pragma once

#include "cpu/convert.h"

namespace qwen_metal {
namespace {

// y = silu(z) * y / rms(y) * weight, in place; z is overwritten.
inline void gated_norm_row(float* y, float* z, const float* weight, int count, float eps) {
  const float rms = __builtin_sqrtf(dot(y, y, count) / count + eps);
  const Vec scale = Vec::of(1.0f / rms);
  apply(z, count, [](Vec x) { return silu(x); });
  int i = 0;
  for (; i + Vec::width <= count; i += Vec::width) {
    (Vec::load(z + i) * (Vec::load(y + i) * scale * Vec::load(weight + i))).store(y + i);
  }
  for (; i < count; ++i) y[i] = z[i] * (y[i] / rms * weight[i]);
}

}  // namespace
}  // namespace qwen_metal
