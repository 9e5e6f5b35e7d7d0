// gated_delta_scan: the gated delta rule over T tokens. Contract: src/qwen_metal/ops/gated_delta_scan.py.
#include "owned.h"
#include "sequence_kernels.h"

namespace qwen_metal {
namespace {

struct ScanParameters {
  bool has_state, has_mask;
  bool operator==(const ScanParameters&) const = default;
};

// Inputs q, k, v, g, beta, then the owned state and the mask where given. Outputs y and the state.
class Scan : public PrimitiveWith<ScanParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    CpuPrimitive::allocate(outputs[0]);
    if (parameters.has_state) {
      outputs[1].copy_shared_buffer(inputs[5]);
    } else {
      CpuPrimitive::allocate(outputs[1]);
    }
  }

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto q = contiguous(inputs[0]), k = contiguous(inputs[1]), v = contiguous(inputs[2]);
    const auto g = contiguous(inputs[3]), beta = contiguous(inputs[4]);
    const int B = v.shape(0), T = v.shape(1), Hv = v.shape(2), Dv = v.shape(3);
    const int Hk = q.shape(2), Dk = q.shape(3);
    const bool* live = nullptr;
    if (parameters.has_mask) {
      live = contiguous(inputs.back()).data<bool>();
    }
    dispatch([=,
              q = q.data<float>(),
              k = k.data<float>(),
              v = v.data<float>(),
              g = g.data<float>(),
              beta = beta.data<float>(),
              y = outputs[0].data<float>(),
              state = outputs[1].data<float>(),
              has_state = parameters.has_state] {
      const auto& kernels = sequence();
      const int64_t size = int64_t(Dv) * Dk;
      for_each_task(int64_t(B) * Hv, 3 * size * B * Hv * T, [&](int64_t task) {
        const int64_t b = task / Hv, h = task % Hv;
        ScanHead head;
        const int64_t at_key = (b * T * Hk + h / (Hv / Hk)) * Dk;
        const int64_t at_value = (b * T * Hv + h) * Dv, at_gate = b * T * Hv + h;
        head.q = q + at_key;
        head.k = k + at_key;
        head.v = v + at_value;
        head.g = g + at_gate;
        head.beta = beta + at_gate;
        head.qk_stride = int64_t(Hk) * Dk;
        head.v_stride = int64_t(Hv) * Dv;
        head.gate_stride = Hv;
        head.live = live ? live + b * T : nullptr;
        head.tokens = T;
        head.Dk = Dk;
        head.Dv = Dv;
        head.state = state + task * size;
        head.y = y + at_value;
        if (T == 1 && !head.live) {
          const float* before = has_state ? head.state : nullptr;
          kernels.scan_token(
              head.q, head.k, head.v, *head.g, *head.beta, before, head.state, Dk, Dv, head.y);
          return;
        }
        if (!has_state) {
          std::memset(head.state, 0, size * sizeof(float));
        }
        kernels.scan(head, scratch(kernels.scan_scratch(T, Dk)));
      });
    });
  }
};

std::pair<mx::array, mx::array> gated_delta_scan(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& g,
    const mx::array& beta,
    const std::optional<mx::array>& state,
    const std::optional<mx::array>& mask) {
  const char* op = "gated_delta_scan";
  check(q.ndim() == 4 && v.ndim() == 4, op, "q and v must have 4 axes");
  const int B = v.shape(0), T = v.shape(1), Hv = v.shape(2), Dv = v.shape(3);
  const int Hk = q.shape(2), Dk = q.shape(3);
  check(Hk > 0 && Hv % Hk == 0, op, Hv, " value heads are no multiple of ", Hk, " key heads");
  check_float(op, "q", q, {B, T, Hk, Dk});
  check_float(op, "k", k, {B, T, Hk, Dk});
  check_float(op, "v", v, {B, T, Hv, Dv});
  check_float(op, "g", g, {B, T, Hv});
  check_float(op, "beta", beta, {B, T, Hv});
  Arrays inputs = {as_float32(q), as_float32(k), as_float32(v), as_float32(g), as_float32(beta)};
  const mx::Shape state_shape = {B, Hv, Dv, Dk};
  if (state) {
    check_float(op, "state", *state, state_shape);
    check(state->dtype() == mx::float32, op, "the state must be float32");
    inputs.push_back(owned(op, *state));
  }
  if (mask) {
    check(
        mask->dtype() == mx::bool_ && mask->shape() == mx::Shape{B, T},
        op,
        "the mask must be bool ",
        text_of(mx::Shape{B, T}));
    inputs.push_back(*mask);
  }
  auto made = mx::array::make_arrays(
      {v.shape(), state_shape},
      {mx::float32, mx::float32},
      std::make_shared<Scan>(
          cpu_stream(op), op, ScanParameters{state.has_value(), mask.has_value()}),
      inputs);
  return {made[0], made[1]};
}

}  // namespace
}  // namespace qwen_metal

void init_gated_delta_scan(nb::module_& m) {
  m.def(
      "gated_delta_scan",
      &qwen_metal::gated_delta_scan,
      "q"_a,
      "k"_a,
      "v"_a,
      "g"_a,
      "beta"_a,
      "state"_a.none(),
      "mask"_a.none());
}
