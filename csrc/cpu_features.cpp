#include "cpu_features.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;

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

// Compiled in and able to run here.
static bool available(Isa isa) {
  [[maybe_unused]] const auto& f = cpu_features();
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(QWEN_METAL_NEON)
    case Isa::neon:
      return f.neon;
#endif
#if defined(QWEN_METAL_AVX2)
    case Isa::avx2:
      return f.avx2;
#endif
#if defined(QWEN_METAL_AVX512)
    case Isa::avx512:
      return f.avx512;
#endif
#if defined(QWEN_METAL_AVX512BF16)
    case Isa::avx512bf16:
      return f.avx512bf16;
#endif
    default:
      return false;
  }
}

constexpr Isa all[] = {Isa::portable, Isa::neon, Isa::avx2, Isa::avx512, Isa::avx512bf16};

const char* isa_name(Isa isa) {
  constexpr const char* names[] = {"portable", "neon", "avx2", "avx512", "avx512bf16"};
  return names[static_cast<int>(isa)];
}

static Isa named(const std::string& name) {
  Isa best = Isa::portable;
  for (Isa isa : all) {
    if (available(isa)) {
      best = isa;
      if (name == isa_name(isa)) {
        return isa;
      }
    }
  }
  if (!name.empty()) {
    throw std::invalid_argument(
        "instruction set " + name + " is not available here, the best is " + isa_name(best));
  }
  return best;
}

static std::atomic<Isa>& current() {
  static std::atomic<Isa> value = [] {
    const char* asked = std::getenv("QWEN_METAL_ISA");
    try {
      return named(asked ? asked : "");
    } catch (const std::invalid_argument&) {
      return named("");  // a set this machine lacks must not keep the package from loading
    }
  }();
  return value;
}

Isa isa() {
  return current().load(std::memory_order_relaxed);
}

void set_isa(const std::string& name) {
  current() = named(name);
}

}  // namespace qwen_metal

void init_cpu_features(nb::module_& m) {
  using namespace qwen_metal;
  m.def(
      "cpu_features",
      [] {
        const auto& f = cpu_features();
        nb::dict d;
        d["avx2"] = f.avx2;
        d["avx512"] = f.avx512;
        d["avx512bf16"] = f.avx512bf16;
        d["neon"] = f.neon;
        return d;
      },
      "What this processor can do, by the names of the instruction-set objects.");
  m.def("isa", [] { return isa_name(isa()); }, "The instruction set in use.");
  m.def(
      "isas",
      [] {
        nb::list names;
        for (Isa isa : all) {
          if (available(isa)) {
            names.append(isa_name(isa));
          }
        }
        return names;
      },
      "The instruction sets that were compiled in and can run here.");
  m.def("set_isa", &set_isa, "name"_a, "Use an instruction set from now on; '' is the best.");
}
