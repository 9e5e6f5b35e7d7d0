// gated_delta_prepare: convolution, SiLU, q/k norm and gates of T tokens. Contract:
// src/qwen_metal/ops/gated_delta_prepare.py.
#include "delta_weights.h"

namespace qwen_metal {
namespace {

struct PrepareParameters {
  DeltaSizes size;
  bool has_state, has_mask, has_lengths;
  bool operator==(const PrepareParameters&) const = default;
};

// Tokens of one task.
constexpr int tokens_a_task = 8;

// The rows that follow the last real token: of the old window and the tokens, kept - 1 before `end`.
void keep_window(const PrepareRow& row, int64_t end, int channels, int kept, char* out) {
  const int64_t width = channels * size_of(row.qkv.type);
  for (int i = 0; i < kept; ++i) {
    const int64_t from = end - kept + i;
    const char* source = nullptr;  // zeros: padding, or no window yet
    if (from >= 0) {
      source = row.live && !row.live[from] ? nullptr : static_cast<const char*>(from_row(row.qkv, from).data);
    } else if (row.conv_state.data) {
      source = static_cast<const char*>(from_row(row.conv_state, from + kept).data);
    }
    source ? std::memcpy(out + i * width, source, width) : std::memset(out + i * width, 0, width);
  }
}

// Inputs qkv, a, b, conv, A_log, dt_bias, then window, mask and lengths where given.
// Outputs q, k, v, g, beta and the window.
class Prepare : public PrimitiveWith<PrepareParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto qkv = contiguous(inputs[0]), a = contiguous(inputs[1]), b = contiguous(inputs[2]);
    const auto w = delta_constants(
        parameters.size, contiguous(inputs[3]), contiguous(inputs[4]), contiguous(inputs[5]));
    const int B = qkv.shape(0), T = qkv.shape(1), channels = qkv.shape(2);
    const auto& s = parameters.size;
    const int kept = s.taps - 1;
    size_t next = 6;
    FloatRows window = {nullptr, Float::f32, channels};
    if (parameters.has_state) {
      window = rows_of(contiguous(inputs[next++]));
    }
    const bool* live = nullptr;
    if (parameters.has_mask) {
      live = contiguous(inputs[next++]).data<bool>();
    }
    const int* lengths = nullptr;
    if (parameters.has_lengths) {
      lengths = contiguous(inputs[next++]).data<int>();
    }
    dispatch([=,
              s = s,
              qkv = rows_of(qkv),
              a = rows_of(a),
              b = rows_of(b),
              q = outputs[0].data<float>(),
              k = outputs[1].data<float>(),
              v = outputs[2].data<float>(),
              g = outputs[3].data<float>(),
              beta = outputs[4].data<float>(),
              out = outputs[5].data<char>()] {
      const auto& kernels = sequence();
      const int64_t keys = int64_t(s.Hk) * s.Dk, values = int64_t(s.Hv) * s.Dv;
      const int blocks = (T + tokens_a_task - 1) / tokens_a_task;
      const auto row_of = [&](int64_t row) {
        return PrepareRow{
            w,
            from_row(qkv, row * T),
            from_row(a, row * T),
            from_row(b, row * T),
            window.data ? from_row(window, row * kept) : window,
            live ? live + row * T : nullptr,
            T,
            q + row * T * keys,
            k + row * T * keys,
            v + row * T * values,
            g + row * T * s.Hv,
            beta + row * T * s.Hv};
      };
      for_each_task(int64_t(B) * blocks, int64_t(16) * B * T * channels, [&](int64_t task) {
        const int first = task % blocks * tokens_a_task;
        kernels.prepare(row_of(task / blocks), first, std::min(T, first + tokens_a_task));
      });
      for (int64_t row = 0; row < B; ++row) {
        const int64_t end = lengths ? std::clamp(lengths[row], 0, T) : T;
        char* to = out + row * kept * channels * size_of(qkv.type);
        keep_window(row_of(row), end, channels, kept, to);
      }
    });
  }
};

Arrays gated_delta_prepare(
    const mx::array& qkv,
    const mx::array& a,
    const mx::array& b,
    const std::optional<mx::array>& conv_state,
    nb::handle weights,
    const std::optional<mx::array>& mask,
    const std::optional<mx::array>& lengths) {
  const char* op = "gated_delta_prepare";
  const auto w = delta_weights(op, weights);
  const auto& s = w.size;
  check(qkv.ndim() == 3, op, "qkv must have 3 axes");
  const int B = qkv.shape(0), T = qkv.shape(1), channels = w.conv.shape(0);
  check_float(op, "qkv", qkv, {B, T, channels});
  check_float(op, "a", a, {B, T, s.Hv});
  check_float(op, "b", b, {B, T, s.Hv});
  Arrays inputs = {qkv, a, b, w.conv, w.A_log, w.dt_bias};
  if (conv_state) {
    check_float(op, "conv_state", *conv_state, {B, s.taps - 1, channels});
    inputs.push_back(mx::astype(*conv_state, qkv.dtype()));
  }
  if (mask) {
    check(
        mask->dtype() == mx::bool_ && mask->shape() == mx::Shape{B, T},
        op,
        "the mask must be bool ",
        text_of(mx::Shape{B, T}));
    inputs.push_back(*mask);
  }
  if (lengths) {
    check(lengths->shape() == mx::Shape{B}, op, "lengths must be (B,)");
    inputs.push_back(mx::astype(*lengths, mx::int32));
  }
  const auto f32 = mx::float32;
  return mx::array::make_arrays(
      {{B, T, s.Hk, s.Dk},
       {B, T, s.Hk, s.Dk},
       {B, T, s.Hv, s.Dv},
       {B, T, s.Hv},
       {B, T, s.Hv},
       {B, s.taps - 1, channels}},
      {f32, f32, f32, f32, f32, qkv.dtype()},
      std::make_shared<Prepare>(
          cpu_stream(op),
          op,
          PrepareParameters{s, conv_state.has_value(), mask.has_value(), lengths.has_value()}),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_gated_delta_prepare(nb::module_& m) {
  m.def(
      "gated_delta_prepare",
      [](const mx::array& qkv,
         const mx::array& a,
         const mx::array& b,
         const std::optional<mx::array>& conv_state,
         nb::object weights,
         const std::optional<mx::array>& mask,
         const std::optional<mx::array>& lengths) {
        return qwen_metal::gated_delta_prepare(qkv, a, b, conv_state, weights, mask, lengths);
      },
      "qkv"_a,
      "a"_a,
      "b"_a,
      "conv_state"_a.none(),
      "weights"_a,
      "mask"_a.none(),
      "lengths"_a.none());
}
