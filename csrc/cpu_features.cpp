#include "cpu_features.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace qwen_metal {

static CpuFeatures detect() {
  CpuFeatures f;
#if defined(__x86_64__)
  // Each of these also asks whether the operating system saves the wide registers.
  __builtin_cpu_init();
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  f.avx512bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
  f.neon = true;
#endif
  return f;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace qwen_metal

void init_cpu_features(nb::module_& m) {
  m.def(
      "cpu_features",
      [] {
        const auto& f = qwen_metal::cpu_features();
        nb::dict d;
        d["avx2"] = f.avx2;
        d["avx512"] = f.avx512;
        d["avx512bf16"] = f.avx512bf16;
        d["neon"] = f.neon;
        return d;
      },
      "What this processor can do, by the names of the instruction-set objects.");
}
