// The experts of 1 to 8 rows in one primitive: gate, up and SwiGLU; then down, scores, shared expert and
// residual. The activation between the stages is float32, and an expert is read once for all its rows.
#include <algorithm>
#include <cmath>

#include "integers.h"
#include "matrix.h"

namespace qwen_metal {
namespace {

struct Parameters {
  MatrixFormat gate, up, down;
  std::optional<MatrixFormat> shared_down;
  bool norm, shared_gate, residual;
  float eps;

  bool operator==(const Parameters&) const = default;
};

struct Values {
  const char* data = nullptr;
  Float type = Float::f32;
};

// Pairs of a row and an expert, sorted by expert.
struct Pair {
  uint32_t expert, row, number;  // number: row * top_k + its place among the row's experts
};

class MoeDecode : public PrimitiveWith<Parameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const Parameters& p = parameters;
    const auto values = [&](const mx::array& input) {
      const auto a = contiguous(input);
      return Values{a.data<char>(), float_of(name(), "argument", a.dtype())};
    };
    size_t next = 0;
    const auto x = values(inputs[next++]);
    const auto id_array = contiguous(inputs[next++]);
    const auto scores = values(inputs[next++]);
    const auto norm = p.norm ? values(inputs[next++]) : Values{};
    const auto shared_logit = p.shared_gate ? values(inputs[next++]) : Values{};
    const auto shared_gate = p.shared_down ? values(inputs[next++]) : Values{};
    const auto shared_up = p.shared_down ? values(inputs[next++]) : Values{};
    const auto residual = p.residual ? values(inputs[next++]) : Values{};
    const auto gate = view_matrix(p.gate, inputs, next, *this);
    const auto up = view_matrix(p.up, inputs, next, *this);
    const auto down = view_matrix(p.down, inputs, next, *this);
    const auto shared_down =
        p.shared_down ? view_matrix(*p.shared_down, inputs, next, *this) : MatrixStack{};
    const int64_t rows = inputs[0].shape(0), top_k = id_array.shape(1);
    if (rows == 0) {
      return;
    }
    const RowsSource source{x.data, x.type, rows, p.gate.columns, norm.data, norm.type, p.eps};

    dispatch([=, op = name(), ids = integers(id_array), y = outputs[0].data<char>()] {
      const QmmKernels& kernels = qmm_kernels();
      const int64_t count = rows * top_k, inner = p.gate.rows, columns = p.down.rows;
      std::vector<Pair> pairs(count);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t e = ids[i];
        check(
            e >= 0 && e < p.gate.experts, op, "id ", e, " is outside ", p.gate.experts, " experts");
        pairs[i] = {uint32_t(e), uint32_t(i / top_k), uint32_t(i)};
      }
      std::stable_sort(
          pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.expert < b.expert; });
      // Runs of one expert, of at most kFewRows rows.
      std::vector<int64_t> runs{0};
      std::vector<uint32_t> picked(count), sorted(count);
      for (int64_t i = 0; i < count; ++i) {
        picked[i] = pairs[i].row;
        sorted[i] = i;
        if (i > runs.back() &&
            (pairs[i].expert != pairs[i - 1].expert || i - runs.back() == kFewRows)) {
          runs.push_back(i);
        }
      }
      const int64_t run_count = count ? runs.size() : 0;
      runs.push_back(count);

      // Stage 1: activation (pairs, inner).
      RowsNeeded needed;
      needed.add(p.gate, true);
      needed.add(p.up, true);
      const Rows h = prepare_rows(needed, source);
      float* activation = scratch(Scratch::activation, std::max<int64_t>(count * inner, 1));
      const int64_t step = output_piece(gate.first, 1);
      const int64_t pieces = (inner + step - 1) / step;
      parallel_for(run_count * pieces, [&](int64_t task) {
        const int64_t run = task / pieces, begin = runs[run];
        const Range part{task % pieces * step, std::min(inner, (task % pieces + 1) * step)};
        const uint32_t expert = pairs[begin].expert;
        Rows some = h;
        some.pick = picked.data() + begin;
        some.count = runs[run + 1] - begin;
        const Tile g =
            multiply(gate.expert(expert), some, 0, some.count, part.begin, part.end, Scratch::gate);
        const Tile u = multiply(up.expert(expert), some, 0, some.count, part.begin, part.end, Scratch::up);
        for (int64_t r = 0; r < some.count; ++r) {
          kernels.swiglu(g.y + r * g.ldy, u.y + r * u.ldy, part.end - part.begin);
          std::copy_n(
              g.y + r * g.ldy, part.end - part.begin, activation + (begin + r) * inner + part.begin);
        }
      });

      // Stage 2: a piece of the outputs at a time, so that a row's sum has one owner and one order.
      RowsNeeded down_needed;
      down_needed.add(p.down, true);
      const Rows act = prepare_rows(
          down_needed,
          {reinterpret_cast<const char*>(activation), Float::f32, count, inner, nullptr},
          Scratch::rows);
      Rows shared_rows{};
      float shared_scale[kFewRows];
      if (p.shared_down) {
        const int64_t width = p.shared_down->columns;
        float* g = scratch(Scratch::expert, 2 * rows * width);
        float* u = g + rows * width;
        load_floats(shared_gate.data, shared_gate.type, 0, rows * width, g);
        load_floats(shared_up.data, shared_up.type, 0, rows * width, u);
        kernels.swiglu(g, u, rows * width);
        RowsNeeded shared_needed;
        shared_needed.add(*p.shared_down, true);
        shared_rows = prepare_rows(
            shared_needed,
            {reinterpret_cast<const char*>(g), Float::f32, rows, width, nullptr},
            Scratch::norm);
        for (int64_t r = 0; r < rows; ++r) {
          const float logit = shared_logit.data ? load_float(shared_logit.data, shared_logit.type, r) : 0.0f;
          shared_scale[r] = shared_logit.data ? 1.0f / (1.0f + std::exp(-logit)) : 1.0f;
        }
      }
      const int64_t out_step = std::min<int64_t>(columns / (4 * thread_count()) + 1, 256);
      parallel_for((columns + out_step - 1) / out_step, [&](int64_t task) {
        const int64_t first = task * out_step, last = std::min(columns, first + out_step);
        const int64_t width = last - first;
        // One row a pair, in the order of the row's experts, then one a row for the total.
        float* each = scratch(Scratch::up, (count + rows) * width);
        for (int64_t run = 0; run < run_count; ++run) {
          const int64_t begin = runs[run];
          Rows some = act;
          some.pick = sorted.data() + begin;
          some.count = runs[run + 1] - begin;
          const Tile t =
              multiply(down.expert(pairs[begin].expert), some, 0, some.count, first, last, Scratch::gate);
          for (int64_t r = 0; r < some.count; ++r) {
            std::copy_n(t.y + r * t.ldy, width, each + pairs[begin + r].number * width);
          }
        }
        float* totals = each + count * width;
        std::fill_n(totals, rows * width, 0.0f);
        for (int64_t i = 0; i < count; ++i) {
          kernels.add(
              totals + i / top_k * width,
              reinterpret_cast<const char*>(each + i * width),
              Float::f32,
              load_float(scores.data, scores.type, i),
              width);
        }
        if (p.shared_down) {
          const Tile t = multiply(shared_down.expert(0), shared_rows, 0, rows, first, last, Scratch::gate);
          for (int64_t r = 0; r < rows; ++r) {
            kernels.add(
                totals + r * width,
                reinterpret_cast<const char*>(t.y + r * t.ldy),
                Float::f32,
                shared_scale[r],
                width);
          }
        }
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t place = r * columns + first;
          if (residual.data) {
            kernels.add(
                totals + r * width,
                residual.data + place * size_of(residual.type),
                residual.type,
                1.0f,
                width);
          }
          kernels.store(totals + r * width, width, y + place * size_of(x.type), x.type);
        }
      });
    });
  }
};

mx::array moe_decode(
    const mx::array& x,
    nb::tuple experts,
    const mx::array& ids,
    const mx::array& scores,
    const std::optional<std::pair<mx::array, float>>& norm,
    const std::optional<nb::tuple>& shared,
    const std::optional<mx::array>& residual) {
  const char* op = "moe_decode";
  float_of(op, "x", x.dtype());
  check(x.ndim() == 2, op, "x is ", text_of(x.shape()), ", needed are 2 axes");
  const int rows = x.shape(0), columns = x.shape(1);
  check(rows <= kFewRows, op, "x has ", rows, " rows, supported are up to ", kFewRows);
  check_integers(op, "ids", ids);
  check(
      ids.ndim() == 2 && ids.shape(0) == rows, op, "ids is ", text_of(ids.shape()), " for ", rows, " rows");
  check_float(op, "scores", scores, ids.shape());

  Arrays inputs{x, ids, scores};
  Parameters p{};
  if (norm) {
    check_float(op, "norm", norm->first, {columns});
    inputs.push_back(norm->first);
    p.norm = true;
    p.eps = norm->second;
  }
  if (shared) {
    check(shared->size() == 4, op, "shared has 4 fields, got ", shared->size());
    if (!(*shared)[0].is_none()) {
      const auto logit = nb::cast<mx::array>((*shared)[0]);
      check_float(op, "shared.gate_logit", logit, {rows, 1});
      inputs.push_back(logit);
      p.shared_gate = true;
    }
    const auto gate = nb::cast<mx::array>((*shared)[1]), up = nb::cast<mx::array>((*shared)[2]);
    check(gate.ndim() == 2, op, "shared.gate is ", text_of(gate.shape()), ", needed are 2 axes");
    check_float(op, "shared.gate", gate, {rows, gate.shape(1)});
    check_float(op, "shared.up", up, gate.shape());
    inputs.push_back(gate);
    inputs.push_back(up);
  }
  if (residual) {
    check_float(op, "residual", *residual, x.shape());
    inputs.push_back(*residual);
    p.residual = true;
  }
  check(experts.size() == 3, op, "experts has 3 fields, got ", experts.size());
  p.gate = take_matrix(op, experts[0], true, inputs);
  p.up = take_matrix(op, experts[1], true, inputs);
  p.down = take_matrix(op, experts[2], true, inputs);
  check(
      p.gate.columns == columns && p.up.columns == columns && p.down.rows == columns,
      op,
      "x has ",
      columns,
      " columns; gate has ",
      p.gate.columns,
      ", up ",
      p.up.columns,
      ", down gives ",
      p.down.rows);
  check(
      p.gate.rows == p.up.rows && p.gate.rows == p.down.columns && p.gate.experts == p.up.experts &&
          p.gate.experts == p.down.experts,
      op,
      "gate, up and down do not fit each other");
  if (shared) {
    p.shared_down = take_matrix(op, (*shared)[3], false, inputs);
    const auto width = nb::cast<mx::array>((*shared)[1]).shape(1);
    check(
        p.shared_down->columns == width && p.shared_down->rows == columns,
        op,
        "shared.down does not fit x and shared.gate");
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<MoeDecode>(cpu_stream(op), op, p), inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_moe_decode(nb::module_& m) {
  m.def(
      "moe_decode",
      &qwen_metal::moe_decode,
      "x"_a,
      "experts"_a,
      "ids"_a,
      "scores"_a,
      "norm"_a.none(),
      "shared"_a.none(),
      "residual"_a.none());
}
