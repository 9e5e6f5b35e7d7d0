// Each pair of a plan through its expert, with SwiGLU of two matrices or the score as epilogue.
#include "integers.h"
#include "matrix.h"

namespace qwen_metal {
namespace {

struct Parameters {
  std::vector<MatrixFormat> matrices;
  int top_k;
  bool gathered, scores;

  bool operator==(const Parameters&) const = default;
};

class GroupedQmm : public PrimitiveWith<Parameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto x = contiguous(inputs[0]), order = contiguous(inputs[1]), offsets = contiguous(inputs[2]);
    size_t next = 3;
    const char* scores = nullptr;
    Float score_type = Float::f32;
    if (parameters.scores) {
      const auto a = contiguous(inputs[next++]);
      scores = a.data<char>();
      score_type = float_of(name(), "scores", a.dtype());
    }
    std::vector<MatrixStack> stacks;
    RowsNeeded needed;
    for (const auto& format : parameters.matrices) {
      stacks.push_back(view_matrix(format, inputs, next, *this));
      needed.add(format, true);
    }
    dispatch([=,
              p = parameters,
              op = name(),
              pairs = int64_t(order.size()),
              source = RowsSource{
                  x.data<char>(), float_of(name(), "x", x.dtype()), x.shape(0), x.shape(1), nullptr},
              order = order.data<uint32_t>(),
              offsets = offsets.data<uint32_t>(),
              y = outputs[0].data<float>()] {
      const int64_t experts = p.matrices[0].experts, outputs = p.matrices[0].rows;
      // A plan is an input like any other: one that does not fit must not read outside the arrays.
      check(offsets[0] == 0 && offsets[experts] == pairs, op, "the plan is of other rows");
      for (int64_t e = 0; e < experts; ++e) {
        check(offsets[e] <= offsets[e + 1], op, "the plan's offsets fall");
      }
      std::vector<uint32_t> rows_of(pairs);
      for (int64_t i = 0; i < pairs; ++i) {
        check(order[i] < pairs, op, "the plan's order is of other rows");
        rows_of[i] = p.gathered ? order[i] / p.top_k : i;
        check(rows_of[i] < source.count, op, "the plan is of more rows than x");
      }
      const Rows all = prepare_rows(needed, source);

      struct Task {
        int64_t expert, first, last;
      };
      std::vector<Task> tasks;
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t count = offsets[e + 1] - offsets[e];
        const int64_t step = count ? output_piece(stacks[0].first, count) : outputs;
        for (int64_t n = 0; count && n < outputs; n += step) {
          tasks.push_back({e, n, std::min(n + step, outputs)});
        }
      }
      parallel_for(tasks.size(), [&](int64_t i) {
        const QmmKernels& kernels = qmm_kernels();
        const Task& t = tasks[i];
        const int64_t begin = offsets[t.expert], count = offsets[t.expert + 1] - begin;
        Rows rows = all;
        rows.pick = rows_of.data() + begin;
        rows.count = count;
        for (int64_t row = 0; row < count; row += kPanelRows) {
          const int64_t some = std::min(kPanelRows, count - row);
          const Tile tile =
              multiply(stacks[0].expert(t.expert), rows, row, some, t.first, t.last, Scratch::gate);
          Tile up{};
          if (stacks.size() == 2) {
            up = multiply(stacks[1].expert(t.expert), rows, row, some, t.first, t.last, Scratch::up);
          }
          for (int64_t r = 0; r < some; ++r) {
            float* from = tile.y + r * tile.ldy;
            const int64_t place = begin + row + r;
            float* to = y + place * outputs + t.first;
            const int64_t n = t.last - t.first;
            if (up.y) {
              kernels.swiglu(from, up.y + r * up.ldy, n);
            }
            const float score = scores ? load_float(scores, score_type, order[place]) : 1.0f;
            for (int64_t j = 0; j < n; ++j) {
              to[j] = from[j] * score;
            }
          }
        }
      });
    });
  }
};

void check_plan(const char* op, const mx::array& a, const char* what, int64_t size) {
  check(
      a.dtype() == mx::uint32 && a.ndim() == 1 && int64_t(a.size()) == size,
      op,
      "the plan's ",
      what,
      " is ",
      text_of(a.dtype()),
      " ",
      text_of(a.shape()),
      ", needed is uint32 (",
      size,
      ",)");
}

mx::array grouped_qmm(
    const mx::array& x,
    nb::sequence matrices,
    const mx::array& order,
    const mx::array& offsets,
    int top_k,
    const std::optional<mx::array>& scores) {
  const char* op = "grouped_qmm";
  float_of(op, "x", x.dtype());
  check(x.ndim() == 2, op, "x is ", text_of(x.shape()), ", needed are 2 axes");
  check(top_k >= 1, op, "top_k is ", top_k);
  const int pairs = order.size();
  check_plan(op, order, "order", pairs);
  Arrays inputs{x, order, offsets};
  if (scores) {
    check_float(op, "scores", *scores, {pairs / top_k, top_k});
    inputs.push_back(*scores);
  }
  std::vector<MatrixFormat> formats;
  for (nb::handle matrix : matrices) {
    formats.push_back(take_matrix(op, matrix, true, inputs));
  }
  check(formats.size() == 1 || (formats.size() == 2 && !scores), op, "got ", formats.size(), " matrices");
  for (const auto& f : formats) {
    check(f.columns == x.shape(1), op, "x has ", x.shape(1), " columns, the weight has ", f.columns);
    check(
        f.rows == formats[0].rows && f.experts == formats[0].experts,
        op,
        "gate and up differ in shape");
  }
  check_plan(op, offsets, "offsets", formats[0].experts + 1);
  // With one expert a row both are of the same size: gate and up take the tokens' rows, down sorted ones.
  const bool gathered = x.shape(0) != pairs || (top_k == 1 && formats.size() == 2);
  check(
      pairs % top_k == 0 && x.shape(0) == (gathered ? pairs / top_k : pairs),
      op,
      "x has ",
      x.shape(0),
      " rows, the plan is of ",
      pairs / top_k,
      " rows and ",
      pairs,
      " pairs");
  const int outputs = formats[0].rows;
  return mx::array(
      {pairs, outputs},
      mx::float32,
      std::make_shared<GroupedQmm>(
          cpu_stream(op), op, Parameters{formats, top_k, gathered, scores.has_value()}),
      inputs);
}

struct SumParameters {
  int top_k;
  bool shared, residual;

  bool operator==(const SumParameters&) const = default;
};

// A token's rows in the order of its experts, then the shared expert, then the residual.
class GatherSum : public PrimitiveWith<SumParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    struct Addend {
      const char* data = nullptr;
      Float type = Float::f32;
    };
    size_t next = 2;
    const auto addend = [&](bool given) {
      if (!given) {
        return Addend{};
      }
      const auto a = contiguous(inputs[next++]);
      return Addend{a.data<char>(), float_of(name(), "addend", a.dtype())};
    };
    const auto y = contiguous(inputs[0]), inverse = contiguous(inputs[1]);
    const Addend sorted{y.data<char>(), float_of(name(), "y", y.dtype())};
    const Addend shared = addend(parameters.shared), residual = addend(parameters.residual);
    dispatch([=,
              op = name(),
              top_k = int64_t(parameters.top_k),
              pairs = int64_t(y.shape(0)),
              columns = int64_t(y.shape(1)),
              inverse = inverse.data<uint32_t>(),
              out = outputs[0].data<char>(),
              type = float_of(name(), "dtype", outputs[0].dtype())] {
      const int64_t rows = pairs / top_k;
      const int64_t pieces = pairs * columns < 65536 ? 1 : 4 * thread_count();
      parallel_for(pieces, [&](int64_t i) {
        const QmmKernels& kernels = qmm_kernels();
        float* total = scratch(Scratch::total, columns);
        const Range part = piece(rows, pieces, i);
        for (int64_t r = part.begin; r < part.end; ++r) {
          std::fill(total, total + columns, 0.0f);
          const auto add = [&](const Addend& a, int64_t row) {
            kernels.add(total, a.data + row * columns * size_of(a.type), a.type, 1.0f, columns);
          };
          for (int64_t k = r * top_k; k < (r + 1) * top_k; ++k) {
            check(inverse[k] < pairs, op, "the plan is of other rows");
            add(sorted, inverse[k]);
          }
          if (shared.data) {
            add(shared, r);
          }
          if (residual.data) {
            add(residual, r);
          }
          kernels.store(total, columns, out + r * columns * size_of(type), type);
        }
      });
    });
  }
};

mx::array gather_sum(
    const mx::array& y,
    const mx::array& inverse,
    int top_k,
    const std::optional<mx::array>& shared,
    const std::optional<mx::array>& residual,
    std::optional<mx::Dtype> dtype) {
  const char* op = "gather_sum";
  float_of(op, "y", y.dtype());
  check(y.ndim() == 2, op, "y is ", text_of(y.shape()), ", needed are 2 axes");
  check(top_k >= 1 && y.shape(0) % top_k == 0, op, "y has ", y.shape(0), " rows, top_k is ", top_k);
  check_plan(op, inverse, "inverse", y.shape(0));
  const mx::Shape shape{y.shape(0) / top_k, y.shape(1)};
  Arrays inputs{y, inverse};
  auto type = y.dtype();
  for (const auto& addend : {shared, residual}) {
    if (addend) {
      check_float(op, "shared or residual", *addend, shape);
      inputs.push_back(*addend);
      type = mx::promote_types(type, addend->dtype());
    }
  }
  type = dtype.value_or(type);
  float_of(op, "dtype", type);
  return mx::array(
      shape,
      type,
      std::make_shared<GatherSum>(
          cpu_stream(op), op, SumParameters{top_k, shared.has_value(), residual.has_value()}),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_grouped_qmm(nb::module_& m) {
  m.def(
      "grouped_qmm",
      &qwen_metal::grouped_qmm,
      "x"_a,
      "matrices"_a,
      "order"_a,
      "offsets"_a,
      "top_k"_a,
      "scores"_a.none());
  m.def(
      "gather_sum",
      &qwen_metal::gather_sum,
      "y"_a,
      "inverse"_a,
      "top_k"_a,
      "shared"_a.none(),
      "residual"_a.none(),
      "dtype"_a.none());
}
