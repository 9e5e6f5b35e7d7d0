// LimitKernels, compiled for each instruction set by limits_<set>.cpp.
#pragma once

#include "limits.h"
#include "simd.h"

namespace qwen_metal {
namespace {

float read(const float* p, int64_t floats, int64_t ahead) {
  Vec totals[4] = {zero(), zero(), zero(), zero()};
  constexpr int64_t step = 64;  // 256 bytes
  for (int64_t i = 0; i + step <= floats; i += step) {
    for (int64_t line = 0; ahead && line < 4; ++line) {
      __builtin_prefetch(reinterpret_cast<const char*>(p + i + 16 * line) + ahead);
    }
#pragma GCC unroll 16
    for (int j = 0; j < step / Vec::width; ++j) {
      totals[j % 4] = totals[j % 4] + Vec::load(p + i + j * Vec::width);
    }
  }
  return sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
}

int multiply_add(int64_t rounds, float a, float b, float* sink) {
  constexpr int chains = 12;  // more than latency times units, no more than there are registers
  Vec total[chains];
  for (int i = 0; i < chains; ++i) {
    total[i] = Vec::of(float(i));
  }
  const Vec factor = Vec::of(a), addend = Vec::of(b);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < chains; ++i) {
      total[i] = fma(total[i], factor, addend);
    }
  }
  float all = 0.0f;
  for (int i = 0; i < chains; ++i) {
    all += sum(total[i]);
  }
  *sink = all;
  return chains * Vec::width;
}

constexpr LimitKernels limit_kernels = {read, multiply_add};

}  // namespace
}  // namespace qwen_metal
