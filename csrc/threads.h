// One pool of threads for all ops: parallel_for(n, f) runs f(0) ... f(n - 1) on it and on the caller.
#pragma once

#include <cstdint>
#include <functional>

namespace qwen_metal {

// QWEN_METAL_THREADS, else the number of processors this process may run on.
int thread_count();
void set_thread_count(int count);  // at least 1; waits for running work

// Runs `task(i)` for every i below `tasks`, each once, in no fixed order. What a task computes must
// depend on i alone, so that the result is the same with any number of threads. An exception in a task
// reaches the caller. Two callers at once share the pool: helpers leave as soon as callers and helpers
// together exceed thread_count().
void parallel_for(int64_t tasks, const std::function<void(int64_t)>& task);

// The i-th of `parts` nearly equal pieces of [0, size), its ends at multiples of `unit`.
struct Range {
  int64_t begin, end;
};
inline Range piece(int64_t size, int64_t parts, int64_t i, int64_t unit = 1) {
  const int64_t units = (size + unit - 1) / unit;
  const auto at = [&](int64_t k) {
    const int64_t place = units * k / parts * unit;
    return place < size ? place : size;
  };
  return {at(i), at(i + 1)};
}

}  // namespace qwen_metal
