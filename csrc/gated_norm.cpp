// gated_norm: RMSNorm times SiLU of a gate. Contract: src/qwen_metal/ops/gated_norm.py.
#include "delta_weights.h"

namespace qwen_metal {
namespace {

struct NormParameters {
  float eps;
  bool operator==(const NormParameters&) const = default;
};

// Inputs y, z, weight (float32).
class GatedNorm : public PrimitiveWith<NormParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto y = contiguous(inputs[0]), z = contiguous(inputs[1]), weight = contiguous(inputs[2]);
    const int64_t count = y.shape(-1), rows = count ? y.size() / count : 0;
    dispatch([=,
              eps = parameters.eps,
              y = rows_of(y),
              z = rows_of(z),
              weight = weight.data<float>(),
              type = float_of(name(), "", outputs[0].dtype()),
              out = outputs[0].data<char>()] {
      const auto& kernels = sequence();
      const int64_t pieces = std::min<int64_t>(rows, 64);
      for_each_task(pieces, 32 * rows * count, [&](int64_t task) {
        float* h = scratch(2 * count);
        float* gate = h + count;
        const auto [first, last] = piece(rows, pieces, task);
        for (int64_t row = first; row < last; ++row) {
          kernels.to_float(from_row(y, row).data, y.type, count, h);
          kernels.to_float(from_row(z, row).data, z.type, count, gate);
          kernels.gated_norm(h, gate, weight, count, eps);
          kernels.from_float(h, count, type, out + row * count * size_of(type));
        }
      });
    });
  }
};

mx::array gated_norm(
    const mx::array& y, const mx::array& z, const mx::array& weight, float eps, mx::Dtype dtype) {
  const char* op = "gated_norm";
  check(y.ndim() >= 1, op, "y must have an axis");
  check_float(op, "y", y, y.shape());
  check_float(op, "z", z, y.shape());
  check_float(op, "weight", weight, {y.shape(-1)});
  float_of(op, "dtype", dtype);
  return mx::array(
      y.shape(),
      dtype,
      std::make_shared<GatedNorm>(cpu_stream(op), op, NormParameters{eps}),
      {y, z, as_float32(weight)});
}

}  // namespace
}  // namespace qwen_metal

void init_gated_norm(nb::module_& m) {
  m.def("gated_norm", &qwen_metal::gated_norm, "y"_a, "z"_a, "weight"_a, "eps"_a, "dtype"_a);
}
