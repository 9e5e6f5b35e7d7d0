// Router logits to the numbers and weights of the best experts.
#include <cmath>
#include <limits>

#include "primitive.h"

namespace qwen_metal {
namespace {

struct Parameters {
  int top_k;
  bool normalise;

  bool operator==(const Parameters&) const = default;
};

// The best of one row, largest first; of equal ones the highest index first. A NaN ranks lowest.
void best(const float* logits, int64_t count, int top_k, uint32_t* ids, float* ranks) {
  int held = 0;
  for (int64_t e = 0; e < count; ++e) {
    const float rank = std::isnan(logits[e]) ? -std::numeric_limits<float>::infinity() : logits[e];
    if (held == top_k && rank < ranks[top_k - 1]) {
      continue;
    }
    int place = held < top_k ? held++ : top_k - 1;
    for (; place > 0 && rank >= ranks[place - 1]; --place) {
      ranks[place] = ranks[place - 1];
      ids[place] = ids[place - 1];
    }
    ranks[place] = rank;
    ids[place] = e;
  }
}

void route(
    const float* logits, int64_t count, const Parameters& p, uint32_t* ids, float* scores) {
  best(logits, count, p.top_k, ids, scores);
  float largest = -std::numeric_limits<float>::infinity();
  bool nan = false;
  for (int64_t e = 0; e < count; ++e) {
    largest = std::max(largest, logits[e]);
    nan = nan || std::isnan(logits[e]);
  }
  // Infinities: inf - inf is NaN here as in any softmax.
  double total = 0.0;
  for (int64_t e = 0; e < count; ++e) {
    total += std::exp(logits[e] - largest);
  }
  double chosen = 0.0;
  for (int k = 0; k < p.top_k; ++k) {
    const float gate = std::exp(logits[ids[k]] - largest);
    scores[k] = nan ? std::numeric_limits<float>::quiet_NaN() : gate;
    chosen += scores[k];
  }
  for (int k = 0; k < p.top_k; ++k) {
    scores[k] = scores[k] / (p.normalise ? chosen : total);
  }
}

class RouteTopk : public PrimitiveWith<Parameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto logits = contiguous(inputs[0]);
    const int64_t experts = logits.shape(-1);
    dispatch([=,
              p = parameters,
              rows = int64_t(logits.size()) / experts,
              type = float_of(name(), "logits", logits.dtype()),
              in = logits.data<char>(),
              ids = outputs[0].data<uint32_t>(),
              scores = outputs[1].data<float>()] {
      const int64_t pieces = rows < 32 ? 1 : 4 * thread_count();
      parallel_for(pieces, [&](int64_t i) {
        std::vector<float> row(experts);
        const Range part = piece(rows, pieces, i);
        for (int64_t r = part.begin; r < part.end; ++r) {
          load_floats(in, type, r * experts, experts, row.data());
          route(row.data(), experts, p, ids + r * p.top_k, scores + r * p.top_k);
        }
      });
    });
  }
};

std::vector<mx::array> route_topk(const mx::array& logits, int top_k, bool normalise) {
  const char* op = "route_topk";
  float_of(op, "logits", logits.dtype());
  check(logits.ndim() >= 1, op, "logits has no axis");
  check(
      1 <= top_k && top_k <= logits.shape(-1),
      op,
      "top_k is ",
      top_k,
      ", supported are 1 to ",
      logits.shape(-1));
  auto shape = logits.shape();
  shape.back() = top_k;
  return mx::array::make_arrays(
      {shape, shape},
      {mx::uint32, mx::float32},
      std::make_shared<RouteTopk>(cpu_stream(op), op, Parameters{top_k, normalise}),
      {logits});
}

}  // namespace
}  // namespace qwen_metal

void init_route_topk(nb::module_& m) {
  m.def("route_topk", &qwen_metal::route_topk, "logits"_a, "top_k"_a, "normalise"_a);
}
