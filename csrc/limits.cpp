// The machine's limits, measured: what qwen_metal.evidence compares the ops with.
#include <algorithm>
#include <chrono>
#include <memory>

#include "cpu/limits.h"
#include "cpu_features.h"
#include "primitive.h"

namespace qwen_metal {
namespace {

const LimitKernels& limit_kernels() {
  return *choose<const LimitKernels*>({
      {Isa::portable, &limits_portable},
#if defined(QWEN_METAL_NEON)
      {Isa::neon, &limits_neon},
#endif
#if defined(QWEN_METAL_AVX2)
      {Isa::avx2, &limits_avx2},
#endif
#if defined(QWEN_METAL_AVX512)
      {Isa::avx512, &limits_avx512},
#endif
  });
}

template <class F>
double seconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Bytes a second of one pass over `a` on every thread, cut as the ops cut their weights.
double read_bandwidth(const mx::array& a, int64_t ahead) {
  check(
      a.dtype() == mx::float32 && a.is_available() && a.flags().row_contiguous,
      "read_bandwidth",
      "needed is an evaluated, row-contiguous float32 array");
  const float* p = a.data<float>();
  const int64_t floats = a.size(), pieces = 8 * thread_count();
  std::vector<float> sinks(pieces);
  const double time = seconds([&] {
    parallel_for(pieces, [&](int64_t i) {
      const Range part = piece(floats, pieces, i, 64);
      sinks[i] = limit_kernels().read(p + part.begin, part.end - part.begin, ahead);
    });
  });
  return floats * sizeof(float) / time;
}

// Multiplications and additions a second, on every thread.
double fma_peak() {
  constexpr int64_t rounds = 2000000;
  const int threads = thread_count();
  std::vector<float> sinks(threads);
  int lanes = 0;
  const double time = seconds([&] {
    parallel_for(threads, [&](int64_t i) {
      const int n = limit_kernels().multiply_add(rounds, 0.999f, 1e-3f, &sinks[i]);
      if (i == 0) {
        lanes = n;
      }
    });
  });
  return 2.0 * lanes * rounds * threads / time;
}

}  // namespace
}  // namespace qwen_metal

void init_limits(nb::module_& m) {
  m.def(
      "read_bandwidth",
      &qwen_metal::read_bandwidth,
      "array"_a,
      "ahead"_a = 0,
      nb::call_guard<nb::gil_scoped_release>(),
      "Bytes a second of one pass over a float32 array, prefetching `ahead` bytes ahead (0: not at all).");
  m.def(
      "fma_peak",
      &qwen_metal::fma_peak,
      nb::call_guard<nb::gil_scoped_release>(),
      "Float32 operations a second of independent multiply-adds.");
}
