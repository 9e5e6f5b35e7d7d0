// What this machine can do at most: reading memory, and multiplying and adding.
#pragma once

#include <cstdint>

namespace qwen_metal {

struct LimitKernels {
  // Adds up `floats` floats from p on, with a hint `ahead` bytes ahead (0: none).
  float (*read)(const float* p, int64_t floats, int64_t ahead);
  // `rounds` times 12 independent multiply-adds of a whole vector; answers with their number of lanes.
  int (*multiply_add)(int64_t rounds, float a, float b, float* sink);
};

extern const LimitKernels limits_portable, limits_neon, limits_avx2, limits_avx512;

}  // namespace qwen_metal
