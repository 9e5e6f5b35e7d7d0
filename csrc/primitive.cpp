#include "primitive.h"

#include <cstring>
#include <sstream>

namespace qwen_metal {

mx::Stream cpu_stream(const char* op) {
  const auto stream = mx::to_stream({});
  check(stream.device == mx::Device::cpu, op, "the default stream is not a CPU stream");
  return stream;
}

void CpuPrimitive::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(inputs, outputs);
  run(inputs, outputs);
}

void CpuPrimitive::allocate(const Arrays&, Arrays& outputs) {
  for (auto& out : outputs) {
    allocate(out);
  }
}

void CpuPrimitive::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error(std::string(name_) + " of qwen_metal runs on the CPU only");
}

// Elements of `a` in row-major order to `out`.
static void copy_strided(
    const char* in, char* out, size_t item, const mx::Shape& shape, const mx::Strides& strides) {
  const int axes = shape.size();
  if (axes == 0) {
    std::memcpy(out, in, item);
    return;
  }
  std::vector<int64_t> index(axes, 0);
  const int64_t row = shape[axes - 1], step = strides[axes - 1] * item;
  while (true) {
    const char* from = in;
    for (int i = 0; i < axes - 1; ++i) {
      from += index[i] * strides[i] * item;
    }
    if (step == static_cast<int64_t>(item)) {
      std::memcpy(out, from, row * item);
    } else {
      for (int64_t i = 0; i < row; ++i) {
        std::memcpy(out + i * item, from + i * step, item);
      }
    }
    out += row * item;
    int axis = axes - 2;
    while (axis >= 0 && ++index[axis] == shape[axis]) {
      index[axis--] = 0;
    }
    if (axis < 0) {
      return;
    }
  }
}

mx::array CpuPrimitive::dense_from(const mx::array& a, int axis) {
  int64_t expected = 1;
  bool dense = true;
  for (int i = static_cast<int>(a.ndim()) - 1; i >= axis; --i) {
    dense = dense && (a.shape(i) == 1 || a.strides(i) == expected);
    expected *= a.shape(i);
  }
  if (dense || a.size() == 0) {
    return a;
  }
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  dispatch([in = a.data<char>(),
            out = copy.data<char>(),
            item = a.itemsize(),
            shape = a.shape(),
            strides = a.strides()] { copy_strided(in, out, item, shape, strides); });
  mx::cpu::get_command_encoder(stream()).add_temporary(copy);
  return copy;
}

std::string text_of(const mx::Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string text_of(mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

Float float_of(const char* op, const char* argument, mx::Dtype dtype) {
  if (dtype == mx::bfloat16) {
    return Float::bf16;
  }
  if (dtype == mx::float16) {
    return Float::f16;
  }
  check(
      dtype == mx::float32,
      op,
      argument,
      " is ",
      text_of(dtype),
      ", supported are bfloat16, float16 and float32");
  return Float::f32;
}

void check_float(const char* op, const char* argument, const mx::array& a, const mx::Shape& shape) {
  float_of(op, argument, a.dtype());
  check(
      a.shape() == shape, op, argument, " is ", text_of(a.shape()), ", needed is ", text_of(shape));
}

static bool any_tracer(nb::handle value) {
  if (nb::isinstance<mx::array>(value)) {
    return nb::cast<const mx::array&>(value).is_tracer();
  }
  if (nb::isinstance<nb::tuple>(value) || nb::isinstance<nb::list>(value)) {
    for (auto item : value) {
      if (any_tracer(item)) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace qwen_metal

void init_primitive(nb::module_& m) {
  m.def(
      "is_tracer",
      [](const mx::array& a) { return a.is_tracer(); },
      "array"_a,
      "True inside mx.grad, mx.vjp, mx.vmap and mx.compile: the array stands for one to come.");
  m.def(
      "any_tracer",
      [](nb::object values) { return qwen_metal::any_tracer(values); },
      "values"_a,
      "is_tracer() of any array in a tree of tuples and lists.");
}
