// attention_prefill: attention of the last T of S positions. Contract:
// src/qwen_metal/ops/attention_prefill.py.
#include "kv_heads.h"

namespace qwen_metal {
namespace {

struct PrefillParameters {
  KVFormat format;
  float scale;
  bool causal, has_start, has_gate;
  bool operator==(const PrefillParameters&) const = default;
};

// Inputs q, keys, values (three arrays each when quantised), then start and gate where given.
class Prefill : public PrimitiveWith<PrefillParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto& format = parameters.format;
    Arrays dense;
    for (size_t i = 0; i < 1 + 2 * size_t(format.arrays()); ++i) {
      dense.push_back(dense_from(inputs[i], 3));
    }
    size_t next = dense.size();
    const int* start = nullptr;
    if (parameters.has_start) {
      start = contiguous(inputs[next++]).data<int>();
    }
    const auto& q = dense[0];
    const int B = q.shape(0), Hq = q.shape(1), T = q.shape(2), D = q.shape(3);
    const int Hkv = dense[1].shape(1), heads = Hq / Hkv;
    const int64_t S = dense[1].shape(2);
    PrefillBlock all{};
    all.S = S;
    all.T = T;
    all.heads = heads;
    all.D = D;
    all.causal = parameters.causal;
    all.scale = parameters.scale;
    all.q_type = float_of(name(), "", q.dtype());
    all.q_head = q.strides(1);
    all.q_token = q.strides(2);
    all.out_token = int64_t(Hq) * D;
    const char* gate = nullptr;
    int64_t gate_row = 0;
    if (parameters.has_gate) {
      const auto g = dense_from(inputs[next], 2);
      gate = g.data<char>();
      gate_row = g.strides(0);
      all.gate_type = float_of(name(), "", g.dtype());
      all.gate_token = g.strides(1);
    }
    dispatch([=,
              keys = kv_arrays(&dense[1], format),
              values = kv_arrays(&dense[1 + format.arrays()], format),
              q = q.data<char>(),
              q_row = q.strides(0),
              out = outputs[0].data<char>()] {
      const auto& kernels = sequence();
      const int tokens = std::max(1, prefill_rows / heads);
      const int64_t blocks = (int64_t(T) + tokens - 1) / tokens, tasks = B * Hkv * blocks;
      for_each_task(tasks, int64_t(B) * Hq * T * S * D, [&](int64_t task) {
        // The last blocks see most keys: they go first, so that no thread ends alone with one.
        const int64_t block = blocks - 1 - task / (B * Hkv);
        const int64_t h = task % Hkv, b = task / Hkv % B, width = size_of(all.q_type);
        PrefillBlock mine = all;
        mine.keys = keys.of(b, h);
        mine.values = values.of(b, h);
        mine.start = start ? std::max(start[b], 0) : 0;
        mine.first_token = block * tokens;
        mine.tokens = std::min(tokens, T - mine.first_token);
        mine.q = q + (b * q_row + h * heads * all.q_head) * width;
        if (gate) {
          mine.gate = gate + (b * gate_row + h * heads * D) * size_of(all.gate_type);
        }
        mine.out = out + (b * T * all.out_token + h * heads * D) * width;
        kernels.prefill(mine, scratch(kernels.prefill_scratch(heads * mine.tokens, D)));
      });
    });
  }
};

mx::array attention_prefill(
    const mx::array& q,
    nb::handle keys,
    nb::handle values,
    float scale,
    const std::optional<mx::array>& start,
    bool causal,
    const std::optional<mx::array>& gate,
    nb::handle quantised) {
  const char* op = "attention_prefill";
  check(q.ndim() == 4, op, "q must be (B, heads, T, D)");
  const int B = q.shape(0), Hq = q.shape(1), T = q.shape(2), D = q.shape(3);
  check_float(op, "q", q, q.shape());
  const auto format = kv_format(op, quantised, D);
  Arrays inputs = {q};
  const auto shape = take_kv(op, "keys", keys, format, D, inputs);
  check(
      take_kv(op, "values", values, format, D, inputs) == shape, op, "keys and values differ in shape");
  check(
      shape[0] == B && shape[1] > 0 && Hq % shape[1] == 0 && (!causal || shape[2] >= T),
      op,
      "q is ",
      text_of(q.shape()),
      " over keys of ",
      text_of(shape));
  if (start) {
    check(start->shape() == mx::Shape{B}, op, "start must be (B,)");
    inputs.push_back(mx::astype(*start, mx::int32));
  }
  if (gate) {
    check_float(op, "gate", *gate, {B, T, Hq * D});
    inputs.push_back(*gate);
  }
  const PrefillParameters parameters = {format, scale, causal, start.has_value(), gate.has_value()};
  return mx::array(
      {B, T, Hq * D},
      q.dtype(),
      std::make_shared<Prefill>(cpu_stream(op), op, parameters),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_attention_prefill(nb::module_& m) {
  m.def(
      "attention_prefill",
      [](const mx::array& q,
         nb::object keys,
         nb::object values,
         float scale,
         const std::optional<mx::array>& start,
         bool causal,
         const std::optional<mx::array>& gate,
         nb::object quantised) {
        return qwen_metal::attention_prefill(
            q, keys, values, scale, start, causal, gate, quantised);
      },
      "q"_a,
      "keys"_a,
      "values"_a,
      "scale"_a,
      "start"_a.none(),
      "causal"_a,
      "gate"_a.none(),
      "quantised"_a.none());
}
