// gqa_decode: attention of one new token a row over its cached keys and values. Contract:
// src/qwen_metal/ops/gqa_decode.py.
#include "kv_heads.h"

namespace qwen_metal {
namespace {

struct DecodeParameters {
  KVFormat format;
  float scale;
  bool has_start, has_gate;
  bool operator==(const DecodeParameters&) const = default;
};

// Positions of one task: the context is split, so that few heads still fill all threads.
constexpr int64_t positions_a_part = 1024;

// Inputs q, keys, values (three arrays each when quantised), then start and gate where given.
class Decode : public PrimitiveWith<DecodeParameters> {
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
    const int B = q.shape(0), Hq = q.shape(1), D = q.shape(3);
    const int Hkv = dense[1].shape(1), heads = Hq / Hkv;
    const int64_t S = dense[1].shape(2);
    FloatRows gate = {nullptr, Float::f32, 0};
    if (parameters.has_gate) {
      const auto g = dense_from(inputs[next], 2);
      gate = {g.data<void>(), float_of(name(), "", g.dtype()), g.strides(0)};
    }
    dispatch([=,
              scale = parameters.scale,
              keys = kv_arrays(&dense[1], format),
              values = kv_arrays(&dense[1 + format.arrays()], format),
              q = q.data<char>(),
              type = float_of(name(), "", q.dtype()),
              q_row = q.strides(0),
              q_head = q.strides(1),
              out = outputs[0].data<char>()] {
      const auto& kernels = sequence();
      const int64_t parts = std::max<int64_t>(1, (S + positions_a_part - 1) / positions_a_part);
      const int64_t tasks = int64_t(B) * Hkv * parts;
      // Of each task: unnormalised sums (heads, D), greatest scores and weights (heads).
      const int64_t size = int64_t(heads) * (D + 2);
      const auto partial = std::make_unique_for_overwrite<float[]>(tasks * size);
      for_each_task(tasks, 2 * int64_t(B) * Hq * S * D, [&](int64_t task) {
        const int64_t p = task % parts, h = task / parts % Hkv, b = task / parts / Hkv;
        float* query = scratch(int64_t(heads) * D + decode_scratch(heads, D));
        for (int g = 0; g < heads; ++g) {
          const char* from = q + (b * q_row + (h * heads + g) * q_head) * size_of(type);
          kernels.to_float(from, type, D, query + g * D);
        }
        for (int64_t i = 0; i < int64_t(heads) * D; ++i) {
          query[i] *= scale;
        }
        float* mine = partial.get() + task * size;
        DecodePart part;
        part.keys = keys.of(b, h);
        part.values = values.of(b, h);
        part.first = p * positions_a_part;
        if (start) {
          part.first = std::max<int64_t>(part.first, start[b]);
        }
        part.last = std::min(S, (p + 1) * positions_a_part);
        part.heads = heads;
        part.D = D;
        part.q = query;
        part.sum = mine;
        part.most = mine + int64_t(heads) * D;
        part.weight = part.most + heads;
        kernels.decode(part, query + int64_t(heads) * D);
      });
      float* o = scratch(2 * D);
      for (int64_t row = 0; row < int64_t(B) * Hq; ++row) {
        const int64_t b = row / Hq, h = row % Hq, g = h % heads;
        const float* first = partial.get() + (b * Hkv + h / heads) * parts * size;
        HeadGate own = {nullptr, gate.type};
        if (gate.data) {
          own.data = at(gate, b, h * D);
        }
        kernels.combine_parts(
            first + g * D,
            first + heads * D + g,
            first + heads * D + heads + g,
            parts,
            size,
            size,
            D,
            own,
            o,
            o + D);
        kernels.from_float(o, D, type, out + row * D * size_of(type));
      }
    });
  }
};

mx::array gqa_decode(
    const mx::array& q,
    nb::handle keys,
    nb::handle values,
    float scale,
    const std::optional<mx::array>& start,
    const std::optional<mx::array>& gate,
    nb::handle quantised) {
  const char* op = "gqa_decode";
  check(q.ndim() == 4 && q.shape(2) == 1, op, "q must be (B, heads, 1, D)");
  const int B = q.shape(0), Hq = q.shape(1), D = q.shape(3);
  check_float(op, "q", q, q.shape());
  const auto format = kv_format(op, quantised, D);
  Arrays inputs = {q};
  const auto shape = take_kv(op, "keys", keys, format, D, inputs);
  check(
      take_kv(op, "values", values, format, D, inputs) == shape, op, "keys and values differ in shape");
  check(
      shape[0] == B && shape[1] > 0 && Hq % shape[1] == 0,
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
    check_float(op, "gate", *gate, {B, 1, Hq * D});
    inputs.push_back(*gate);
  }
  return mx::array(
      {B, 1, Hq * D},
      q.dtype(),
      std::make_shared<Decode>(
          cpu_stream(op), op, DecodeParameters{format, scale, start.has_value(), gate.has_value()}),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_gqa_decode(nb::module_& m) {
  m.def(
      "gqa_decode",
      [](const mx::array& q,
         nb::object keys,
         nb::object values,
         float scale,
         const std::optional<mx::array>& start,
         const std::optional<mx::array>& gate,
         nb::object quantised) {
        return qwen_metal::gqa_decode(q, keys, values, scale, start, gate, quantised);
      },
      "q"_a,
      "keys"_a,
      "values"_a,
      "scale"_a,
      "start"_a.none(),
      "gate"_a.none(),
      "quantised"_a.none());
}
