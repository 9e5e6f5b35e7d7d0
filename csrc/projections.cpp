// RMSNorm folded in, several matrices of any formats on one set of rows, residual, any output dtype.
#include "matrix.h"

namespace qwen_metal {
namespace {

struct Parameters {
  std::vector<MatrixFormat> matrices;
  bool norm, residual;
  float eps;
  mx::Dtype dtype;

  bool operator==(const Parameters&) const = default;
};

class Projections : public PrimitiveWith<Parameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto x = contiguous(inputs[0]);
    size_t next = 1;
    RowsSource source{
        x.data<char>(), float_of(name(), "x", x.dtype()), 0, x.shape(-1), nullptr, Float::f32, parameters.eps};
    source.count = source.columns ? x.size() / source.columns : 0;
    if (source.count == 0) {
      return;
    }
    if (parameters.norm) {
      const auto weight = contiguous(inputs[next++]);
      source.norm = weight.data<char>();
      source.norm_type = float_of(name(), "norm", weight.dtype());
    }
    const char* residual = nullptr;
    Float residual_type = Float::f32;
    if (parameters.residual) {
      const auto a = contiguous(inputs[next++]);
      residual = a.data<char>();
      residual_type = float_of(name(), "residual", a.dtype());
    }
    std::vector<MatrixStack> stacks;
    std::vector<char*> ys;
    RowsNeeded needed;
    for (size_t i = 0; i < parameters.matrices.size(); ++i) {
      stacks.push_back(view_matrix(parameters.matrices[i], inputs, next, *this));
      ys.push_back(outputs[i].data<char>());
      needed.add(parameters.matrices[i], source.count <= kFewRows);
    }
    dispatch([=, out_type = float_of(name(), "dtype", parameters.dtype)] {
      const QmmKernels& kernels = qmm_kernels();
      const Rows rows = prepare_rows(needed, source);

      struct Task {
        MatrixView matrix;
        char* y;
        Range rows, outputs;
      };
      std::vector<Task> tasks;
      const int64_t blocks = rows.count <= kFewRows ? 1 : (rows.count + kPanelRows - 1) / kPanelRows;
      for (size_t i = 0; i < stacks.size(); ++i) {
        const MatrixView m = stacks[i].expert(0);
        const int64_t step = output_piece(m, rows.count);
        for (int64_t n = 0; n < m.rows; n += step) {
          for (int64_t b = 0; b < blocks; ++b) {
            tasks.push_back(
                {m, ys[i], piece(rows.count, blocks, b, 6), {n, std::min(n + step, m.rows)}});
          }
        }
      }
      const int64_t out_bytes = size_of(out_type), residual_bytes = size_of(residual_type);
      parallel_for(tasks.size(), [&](int64_t i) {
        const Task& t = tasks[i];
        const int64_t n = t.outputs.begin, count = t.outputs.end - n;
        const Tile tile = multiply(
            t.matrix, rows, t.rows.begin, t.rows.end - t.rows.begin, n, t.outputs.end, Scratch::gate);
        for (int64_t r = t.rows.begin; r < t.rows.end; ++r) {
          float* y = tile.y + (r - t.rows.begin) * tile.ldy;
          const int64_t place = r * t.matrix.rows + n;
          if (residual) {
            kernels.add(y, residual + place * residual_bytes, residual_type, 1.0f, count);
          }
          kernels.store(y, count, t.y + place * out_bytes, out_type);
        }
      });
    });
  }
};

std::vector<mx::array> projections(
    const mx::array& x,
    nb::sequence matrices,
    const std::optional<std::pair<mx::array, float>>& norm,
    const std::optional<mx::array>& residual,
    mx::Dtype dtype) {
  const char* op = "projections";
  float_of(op, "x", x.dtype());
  float_of(op, "dtype", dtype);
  check(x.ndim() >= 1, op, "x has no axis");
  const int columns = x.shape(-1);
  Arrays inputs{x};
  if (norm) {
    check_float(op, "norm", norm->first, {columns});
    inputs.push_back(norm->first);
  }
  const size_t at_residual = inputs.size();
  if (residual) {
    inputs.push_back(*residual);
  }
  std::vector<MatrixFormat> formats;
  std::vector<mx::Shape> shapes;
  for (nb::handle matrix : matrices) {
    formats.push_back(take_matrix(op, matrix, false, inputs));
    const auto& f = formats.back();
    check(f.columns == columns, op, "x has ", columns, " columns, the weight has ", f.columns);
    auto shape = x.shape();
    shape.back() = f.rows;
    shapes.push_back(shape);
  }
  check(!formats.empty(), op, "got no matrix");
  if (residual) {
    check(formats.size() == 1, op, "a residual goes with a single matrix");
    check_float(op, "residual", inputs[at_residual], shapes[0]);
  }
  const std::vector<mx::Dtype> dtypes(shapes.size(), dtype);
  return mx::array::make_arrays(
      shapes,
      dtypes,
      std::make_shared<Projections>(
          cpu_stream(op),
          op,
          Parameters{formats, norm.has_value(), residual.has_value(), norm ? norm->second : 0.0f, dtype}),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_projections(nb::module_& m) {
  m.def(
      "projections",
      &qwen_metal::projections,
      "x"_a,
      "matrices"_a,
      "norm"_a.none(),
      "residual"_a.none(),
      "dtype"_a);
}
