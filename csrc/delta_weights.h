// The small weights of a Gated DeltaNet as Python's DeltaWeights holds them, checked.
#pragma once

#include "sequence_kernels.h"

namespace qwen_metal {

struct DeltaWeights {
  mx::array conv, A_log, dt_bias, norm;
  DeltaSizes size;
  float eps;
};

inline DeltaWeights delta_weights(const char* op, nb::handle w) {
  const auto array = [&](const char* name) { return nb::cast<mx::array>(w.attr(name)); };
  const auto number = [&](const char* name) { return nb::cast<int>(w.attr(name)); };
  DeltaWeights d{
      array("conv"),
      array("A_log"),
      array("dt_bias"),
      array("norm"),
      {number("num_k_heads"), number("num_v_heads"), number("head_k_dim"), number("head_v_dim"), 0},
      nb::cast<float>(w.attr("eps"))};
  auto& s = d.size;
  check(
      s.Hk > 0 && s.Hv > 0 && s.Hv % s.Hk == 0 && s.Dk > 0 && s.Dv > 0,
      op,
      "the heads do not divide: ",
      s.Hk,
      " key heads, ",
      s.Hv,
      " value heads");
  const int channels = 2 * s.Hk * s.Dk + s.Hv * s.Dv;
  check(d.conv.ndim() == 3, op, "the convolution's taps must have 3 axes");
  s.taps = d.conv.shape(1);
  check(s.taps >= 1 && s.taps <= max_taps, op, s.taps, " taps, supported are 1 to ", max_taps);
  check_float(op, "conv", d.conv, {channels, s.taps, 1});
  check_float(op, "A_log", d.A_log, {s.Hv});
  check_float(op, "dt_bias", d.dt_bias, {s.Hv});
  check_float(op, "norm", d.norm, {s.Dv});
  return d;
}

// The pointers of contiguous arrays in the order conv, A_log, dt_bias.
inline DeltaConstants delta_constants(
    const DeltaSizes& size, const mx::array& conv, const mx::array& A_log, const mx::array& dt_bias) {
  const auto type = [](const mx::array& a) { return float_of("", "", a.dtype()); };
  return {
      size,
      conv.data<void>(),
      type(conv),
      A_log.data<void>(),
      dt_bias.data<void>(),
      type(A_log),
      type(dt_bias)};
}

// FloatRows of a (T, C) array, or of one like it.
inline FloatRows rows_of(const mx::array& a) {
  return {a.data<void>(), float_of("", "", a.dtype()), a.ndim() ? a.shape(-1) : 1};
}

inline FloatRows from_row(FloatRows rows, int64_t row) {
  rows.data = static_cast<const char*>(rows.data) + row * rows.stride * size_of(rows.type);
  return rows;
}

}  // namespace qwen_metal
