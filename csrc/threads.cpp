#include "threads.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "mlx/threadpool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qwen_metal {

static int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

static int wanted_threads() {
  if (const char* text = std::getenv("QWEN_METAL_THREADS")) {
    const int count = std::atoi(text);
    if (count >= 1) {
      return std::min(count, 1024);
    }
  }
  return processors();
}

namespace {

struct Pool {
  std::shared_mutex resizing;  // held shared by work, alone by set_thread_count()
  std::atomic<int> threads;
  std::atomic<int> running{0};  // callers and helpers at work
  std::unique_ptr<ThreadPool> helpers;

  explicit Pool(int count) : threads(count) {
    if (count > 1) {
      helpers = std::make_unique<ThreadPool>(count - 1);
    }
  }
};

// What the caller and its helpers share; helpers that start late find nothing left and only drop it.
struct Job {
  const std::function<void(int64_t)>* task;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex lock;
  std::condition_variable finished;
  std::exception_ptr error;

  void run(int64_t i) {
    try {
      (*task)(i);
    } catch (...) {
      std::lock_guard guard(lock);
      if (!error) {
        error = std::current_exception();
      }
    }
    if (done.fetch_add(1) + 1 == tasks) {
      std::lock_guard guard(lock);
      finished.notify_all();
    }
  }
};

}  // namespace

static Pool& pool() {
  // Never destroyed: at exit a stream's thread may still be at work.
  static Pool* value = new Pool(wanted_threads());
  return *value;
}

int thread_count() {
  return pool().threads;
}

void set_thread_count(int count) {
  if (count < 1 || count > 1024) {
    throw std::invalid_argument("the number of threads must be from 1 to 1024");
  }
  Pool& p = pool();
  std::unique_lock alone(p.resizing);
  p.helpers = count > 1 ? std::make_unique<ThreadPool>(count - 1) : nullptr;
  p.threads = count;
}

void parallel_for(int64_t tasks, const std::function<void(int64_t)>& task) {
  if (tasks <= 0) {
    return;
  }
  Pool& p = pool();
  std::shared_lock working(p.resizing);
  const int running = p.running.fetch_add(1) + 1;
  struct Leave {
    Pool& p;
    ~Leave() {
      p.running.fetch_sub(1);
    }
  } leave{p};

  const int64_t helpers = std::min<int64_t>(std::max(0, p.threads - running), tasks - 1);
  if (helpers == 0) {
    for (int64_t i = 0; i < tasks; ++i) {
      task(i);
    }
    return;
  }
  auto job = std::make_shared<Job>();
  job->task = &task;
  job->tasks = tasks;
  for (int64_t h = 0; h < helpers; ++h) {
    p.helpers->enqueue([job, &p] {
      // A helper counts as running only while it works, and makes way for a second caller.
      while (true) {
        if (p.running.fetch_add(1) + 1 > p.threads) {
          p.running.fetch_sub(1);
          return;
        }
        const int64_t i = job->next.fetch_add(1);
        if (i < job->tasks) {
          job->run(i);
        }
        p.running.fetch_sub(1);
        if (i >= job->tasks) {
          return;
        }
      }
    });
  }
  for (int64_t i; (i = job->next.fetch_add(1)) < tasks;) {
    job->run(i);
  }
  if (job->done.load() < tasks) {
    std::unique_lock guard(job->lock);
    job->finished.wait(guard, [&] { return job->done.load() == tasks; });
  }
  if (job->error) {
    std::rethrow_exception(job->error);
  }
}

}  // namespace qwen_metal

void init_threads(nb::module_& m) {
  m.def("threads", &qwen_metal::thread_count, "Threads that one op may use.");
  m.def(
      "set_threads",
      [](int count) {
        nb::gil_scoped_release unlocked;
        qwen_metal::set_thread_count(count);
      },
      "count"_a,
      "Change it for this process (QWEN_METAL_THREADS sets it at the start).");
}
