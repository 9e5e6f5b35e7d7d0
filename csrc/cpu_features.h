// What the processor this runs on can do; what was compiled in is QWEN_METAL_AVX2 and so on.
#pragma once

namespace qwen_metal {

struct CpuFeatures {
  bool avx2 = false;        // with FMA (F16C came before it)
  bool avx512 = false;      // F, BW, DQ and VL together
  bool avx512bf16 = false;  // and BF16
  bool neon = false;
};

// Read once, then a plain load.
const CpuFeatures& cpu_features();

}  // namespace qwen_metal
