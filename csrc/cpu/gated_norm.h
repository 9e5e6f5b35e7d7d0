// RMSNorm times SiLU of a gate, over rows.
#pragma once

#include "cpu/convert.h"

namespace qwen_metal::cpu {
namespace {

/// y = silu(z) * y / rms(y) * weight, in place; z is overwritten.
template <class V>
inline void gated_norm_row(float* y, float* z, const float* weight, int count, float eps) {
  const float rms = __builtin_sqrtf(dot<V>(y, y, count) / count + eps);
  const V scale = V::all(1.0f / rms);
  apply<V>(z, count, [](V x) { return silu(x); });
  int i = 0;
  for (; i + V::lanes <= count; i += V::lanes) {
    (V::load(z + i) * (V::load(y + i) * scale * V::load(weight + i))).store(y + i);
  }
  for (; i < count; ++i) y[i] = z[i] * (y[i] / rms * weight[i]);
}

}  // namespace
}  // namespace qwen_metal::cpu
