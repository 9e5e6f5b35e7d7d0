// What the processor this runs on can do, and which of the compiled instruction sets serves a call.
#pragma once

#include <initializer_list>
#include <string>

namespace qwen_metal {

struct CpuFeatures {
  bool avx2 = false;        // with FMA (F16C came before it)
  bool avx512 = false;      // F, BW, DQ and VL together
  bool avx512bf16 = false;  // and BF16
  bool neon = false;
};

// Read once, then a plain load.
const CpuFeatures& cpu_features();

// In rising order of preference on one processor family.
enum class Isa { portable, neon, avx2, avx512, avx512bf16 };

// The set in use: QWEN_METAL_ISA (portable, neon, avx2, avx512, avx512bf16) where it is given and this
// processor and build have it, else the best they have. set_isa() changes it, for tests.
Isa isa();
void set_isa(const std::string& name);  // "" is the best; ValueError for one that cannot run here
const char* isa_name(Isa isa);

template <class F>
struct Compiled {
  Isa isa;
  F kernel;
};

// The last entry whose instruction set is not above the one in use. The first must be portable.
//   static const auto table = {Compiled{Isa::portable, &f_portable}, ...};  one #if a set, in one place
template <class F>
F choose(std::initializer_list<Compiled<F>> table) {
  F best = table.begin()->kernel;
  for (const auto& entry : table) {
    if (entry.isa <= isa()) {
      best = entry.kernel;
    }
  }
  return best;
}

}  // namespace qwen_metal
