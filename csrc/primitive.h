// What every op of csrc/ builds on: a primitive that runs on the CPU, checks, and plain views of arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "cpu/dtype.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "threads.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace qwen_metal {

using Arrays = std::vector<mx::array>;

// The stream an op runs on: the default one of the calling thread, which must be a CPU stream.
mx::Stream cpu_stream(const char* op);

// An op derives from this, and overrides run() and, where it has parameters, is_equivalent().
// run() is called on the thread that builds the schedule: it may read shapes and strides, and no
// elements. It hands what reads elements to dispatch(), as a closure over plain pointers.
class CpuPrimitive : public mx::Primitive {
 public:
  CpuPrimitive(mx::Stream stream, const char* name) : mx::Primitive(stream), name_(name) {}

  // Inputs and outputs stay alive until the closure ran. Outputs are allocated, row-contiguous, and
  // not cleared: a closure writes every element.
  virtual void run(const Arrays& inputs, Arrays& outputs) = 0;

  // Called before run(). An op that works in place shares the buffer of an input that owned() made.
  virtual void allocate(const Arrays& inputs, Arrays& outputs);

  void eval_cpu(const Arrays& inputs, Arrays& outputs) final;
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;
  const char* name() const final {
    return name_;
  }

  // A row-contiguous array of the same elements: itself, or a copy made on the stream before the closure.
  mx::array contiguous(const mx::array& a) {
    return dense_from(a, 0);
  }

  // The same, where axes below `axis` may keep any stride: a slice of the experts of a larger array is
  // taken as it stands, and only one whose own rows are scattered is copied.
  mx::array dense_from(const mx::array& a, int axis);

 protected:
  static void allocate(mx::array& output) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }

  template <class F>
  void dispatch(F&& closure) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::forward<F>(closure));
  }

 private:
  const char* name_;
};

// Parameters that are compared by value: struct P { ...; bool operator==(const P&) const = default; };
template <class P>
class PrimitiveWith : public CpuPrimitive {
 public:
  PrimitiveWith(mx::Stream stream, const char* name, P parameters)
      : CpuPrimitive(stream, name), parameters(std::move(parameters)) {}

  bool is_equivalent(const mx::Primitive& other) const override {
    return typeid(*this) == typeid(other) &&
        parameters == static_cast<const PrimitiveWith&>(other).parameters;
  }

 protected:
  const P parameters;
};

// Checks raise std::invalid_argument, which Python sees as ValueError.
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::string text = std::string(op) + ": ";
  const auto add = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  throw std::invalid_argument(text);
}

template <class... Parts>
void check(bool good, const char* op, const Parts&... parts) {
  if (!good) {
    fail(op, parts...);
  }
}

std::string text_of(const mx::Shape& shape);  // "(2, 3)"
std::string text_of(mx::Dtype dtype);         // "float32"

// bfloat16, float16 or float32, as the kernels name it; ValueError for another dtype.
Float float_of(const char* op, const char* argument, mx::Dtype dtype);

// A float array of exactly this shape.
void check_float(const char* op, const char* argument, const mx::array& a, const mx::Shape& shape);

}  // namespace qwen_metal
