// What the ops along a sequence share: the table of the instruction set in use, scratch memory, threads.
#pragma once

#include <memory>
#include <new>

#include "cpu/sequence.h"
#include "cpu_features.h"
#include "primitive.h"

namespace qwen_metal {

inline const SequenceKernels& sequence() {
  return *choose<const SequenceKernels*>({
      {Isa::portable, &sequence_portable},
#if defined(QWEN_METAL_NEON)
      {Isa::neon, &sequence_neon},
#endif
#if defined(QWEN_METAL_AVX2)
      {Isa::avx2, &sequence_avx2},
#endif
#if defined(QWEN_METAL_AVX512)
      {Isa::avx512, &sequence_avx512},
#endif
  });
}

// `floats` floats of this thread's own memory, kept from call to call and aligned to a cache line.
// A later call in the same task gives the same memory: ask once.
inline float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const {
      ::operator delete(p, std::align_val_t(64));
    }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t room = 0;
  if (floats > room) {
    memory.reset();
    room = 0;
    memory.reset(static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t(64))));
    room = floats;
  }
  return memory.get();
}

// Products below which waking another thread costs more than it saves.
constexpr int64_t worth_a_thread = 1 << 18;

// parallel_for, or a plain loop where all tasks together are too small for it.
template <class F>
void for_each_task(int64_t tasks, int64_t products, F&& task) {
  if (products < worth_a_thread) {
    for (int64_t i = 0; i < tasks; ++i) {
      task(i);
    }
  } else {
    parallel_for(tasks, task);
  }
}

inline mx::array as_float32(const mx::array& a) {
  return mx::astype(a, mx::float32);
}

}  // namespace qwen_metal
