// gated_delta_step: a whole Gated DeltaNet for one token between its projections. Contract:
// src/qwen_metal/ops/gated_delta_step.py.
#include "delta_weights.h"
#include "owned.h"

namespace qwen_metal {
namespace {

struct StepParameters {
  DeltaSizes size;
  float eps;
  bool has_window, has_state, has_padding, has_lengths;
  bool operator==(const StepParameters&) const = default;
};

// Inputs qkv, z, b, a, conv, A_log, dt_bias, norm, then window, owned state, left padding and lengths
// where given. Outputs y, the window and the state.
class Step : public PrimitiveWith<StepParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    CpuPrimitive::allocate(outputs[0]);
    CpuPrimitive::allocate(outputs[1]);
    if (parameters.has_state) {
      outputs[2].copy_shared_buffer(inputs[8 + parameters.has_window]);
    } else {
      CpuPrimitive::allocate(outputs[2]);
    }
  }

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto qkv = contiguous(inputs[0]), z = contiguous(inputs[1]);
    const auto b = contiguous(inputs[2]), a = contiguous(inputs[3]);
    const auto w = delta_constants(
        parameters.size, contiguous(inputs[4]), contiguous(inputs[5]), contiguous(inputs[6]));
    const auto norm = contiguous(inputs[7]);
    const int B = qkv.shape(0), channels = qkv.shape(2);
    size_t next = 8;
    FloatRows window = {nullptr, Float::f32, channels};
    if (parameters.has_window) {
      window = rows_of(contiguous(inputs[next++]));
    }
    next += parameters.has_state;
    const int* padding = nullptr;
    if (parameters.has_padding) {
      padding = contiguous(inputs[next++]).data<int>();
    }
    const int* lengths = nullptr;
    if (parameters.has_lengths) {
      lengths = contiguous(inputs[next++]).data<int>();
    }
    dispatch([=,
              s = parameters.size,
              eps = parameters.eps,
              qkv = rows_of(qkv),
              z = rows_of(z),
              a = rows_of(a),
              b = rows_of(b),
              norm = norm.data<float>(),
              y = outputs[0].data<char>(),
              window_out = outputs[1].data<char>(),
              state = outputs[2].data<float>(),
              has_state = parameters.has_state] {
      const auto& kernels = sequence();
      const int64_t width = size_of(qkv.type), size = int64_t(s.Hv) * s.Dv * s.Dk;
      const int64_t kept = s.taps - 1, outputs = int64_t(s.Hv) * s.Dv;
      for_each_task(int64_t(B) * s.Hk, 3 * B * size, [&](int64_t task) {
        const int64_t row = task / s.Hk;
        const bool ended = lengths && lengths[row] <= 0;
        const StepRow call = {
            w,
            from_row(qkv, row),
            from_row(z, row),
            from_row(a, row),
            from_row(b, row),
            window.data ? from_row(window, row * kept) : window,
            !ended && !(padding && padding[row] > 0),
            ended,
            norm,
            eps,
            has_state ? state + row * size : nullptr,
            state + row * size,
            window_out + row * kept * channels * width,
            y + row * outputs * width};
        kernels.step(call, task % s.Hk, scratch(step_scratch(s)));
      });
    });
  }
};

Arrays gated_delta_step(
    const mx::array& qkv,
    const mx::array& z,
    const mx::array& b,
    const mx::array& a,
    const std::optional<mx::array>& conv_state,
    const std::optional<mx::array>& state,
    nb::handle weights,
    const std::optional<mx::array>& left_padding,
    const std::optional<mx::array>& lengths) {
  const char* op = "gated_delta_step";
  const auto w = delta_weights(op, weights);
  const auto& s = w.size;
  check(qkv.ndim() == 3 && qkv.shape(1) == 1, op, "qkv must be (B, 1, channels)");
  const int B = qkv.shape(0), channels = w.conv.shape(0);
  check_float(op, "qkv", qkv, {B, 1, channels});
  check_float(op, "z", z, {B, 1, s.Hv * s.Dv});
  check_float(op, "b", b, {B, 1, s.Hv});
  check_float(op, "a", a, {B, 1, s.Hv});
  Arrays inputs = {qkv, z, b, a, w.conv, w.A_log, w.dt_bias, as_float32(w.norm)};
  if (conv_state) {
    check_float(op, "conv_state", *conv_state, {B, s.taps - 1, channels});
    inputs.push_back(mx::astype(*conv_state, qkv.dtype()));
  }
  const mx::Shape state_shape = {B, s.Hv, s.Dv, s.Dk};
  if (state) {
    check_float(op, "state", *state, state_shape);
    check(state->dtype() == mx::float32, op, "the state must be float32");
    inputs.push_back(owned(op, *state));
  }
  for (const auto* row : {&left_padding, &lengths}) {
    if (*row) {
      check((*row)->shape() == mx::Shape{B}, op, "left_padding and lengths must be (B,)");
      inputs.push_back(mx::astype(**row, mx::int32));
    }
  }
  const StepParameters parameters = {
      s,
      w.eps,
      conv_state.has_value(),
      state.has_value(),
      left_padding.has_value(),
      lengths.has_value()};
  return mx::array::make_arrays(
      {{B, 1, s.Hv * s.Dv}, {B, s.taps - 1, channels}, state_shape},
      {qkv.dtype(), qkv.dtype(), mx::float32},
      std::make_shared<Step>(cpu_stream(op), op, parameters),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_gated_delta_step(nb::module_& m) {
  m.def(
      "gated_delta_step",
      [](const mx::array& qkv,
         const mx::array& z,
         const mx::array& b,
         const mx::array& a,
         const std::optional<mx::array>& conv_state,
         const std::optional<mx::array>& state,
         nb::object weights,
         const std::optional<mx::array>& left_padding,
         const std::optional<mx::array>& lengths) {
        return qwen_metal::gated_delta_step(
            qkv, z, b, a, conv_state, state, weights, left_padding, lengths);
      },
      "qkv"_a,
      "z"_a,
      "b"_a,
      "a"_a,
      "conv_state"_a.none(),
      "state"_a.none(),
      "weights"_a,
      "left_padding"_a.none(),
      "lengths"_a.none());
}
