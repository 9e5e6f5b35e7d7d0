// Expert numbers to rows sorted by expert: a counting sort, and the map of tiles.
#include "integers.h"

namespace qwen_metal {
namespace {

struct Parameters {
  int num_experts, tile_rows;

  bool operator==(const Parameters&) const = default;
};

constexpr uint32_t kSentinel = 0xffffffff;

class RoutePlan : public PrimitiveWith<Parameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto ids = contiguous(inputs[0]);
    dispatch([p = parameters,
              op = name(),
              pairs = int64_t(ids.size()),
              ids = integers(ids),
              order = outputs[0].data<uint32_t>(),
              inverse = outputs[1].data<uint32_t>(),
              experts = outputs[2].data<uint32_t>(),
              offsets = outputs[3].data<uint32_t>(),
              blocks = outputs[4].data<uint32_t>(),
              bound = int64_t(outputs[4].shape(0))] {
      std::fill(offsets, offsets + p.num_experts + 1, 0u);
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t e = ids[i];
        check(e >= 0 && e < p.num_experts, op, "id ", e, " is outside ", p.num_experts, " experts");
        ++offsets[e + 1];
      }
      for (int e = 0; e < p.num_experts; ++e) {
        offsets[e + 1] += offsets[e];
      }
      std::vector<uint32_t> place(offsets, offsets + p.num_experts);
      for (int64_t i = 0; i < pairs; ++i) {
        const uint32_t e = ids[i], at = place[e]++;
        order[at] = i;
        inverse[i] = at;
        experts[at] = e;
      }
      int64_t block = 0;
      for (int e = 0; e < p.num_experts; ++e) {
        for (uint32_t at = offsets[e]; at < offsets[e + 1]; at += p.tile_rows, ++block) {
          blocks[2 * block] = e;
          blocks[2 * block + 1] = at;
        }
      }
      for (; block < bound; ++block) {
        blocks[2 * block] = kSentinel;
        blocks[2 * block + 1] = pairs;
      }
    });
  }
};

// order, inverse, experts, offsets, blocks of ops/route_plan.py.
std::vector<mx::array> route_plan(const mx::array& ids, int num_experts, int tile_rows) {
  const char* op = "route_plan";
  check_integers(op, "ids", ids);
  check(ids.ndim() == 2, op, "ids is ", text_of(ids.shape()), ", needed are 2 axes");
  check(num_experts >= 1, op, "num_experts is ", num_experts);
  check(tile_rows >= 1, op, "tile_rows is ", tile_rows);
  check(ids.size() < kSentinel / 2, op, "too many ids");
  const int pairs = ids.size();
  const int bound = (pairs + tile_rows - 1) / tile_rows + std::min(num_experts, pairs);
  return mx::array::make_arrays(
      {{pairs}, {pairs}, {pairs}, {num_experts + 1}, {bound, 2}},
      std::vector<mx::Dtype>(5, mx::uint32),
      std::make_shared<RoutePlan>(cpu_stream(op), op, Parameters{num_experts, tile_rows}),
      {ids});
}

}  // namespace
}  // namespace qwen_metal

void init_route_plan(nb::module_& m) {
  m.def("route_plan", &qwen_metal::route_plan, "ids"_a, "num_experts"_a, "tile_rows"_a);
}
