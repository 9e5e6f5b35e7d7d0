// attention_prepare: query/key norm, RoPE and the gate's split. Contract:
// src/qwen_metal/ops/attention_prepare.py.
#include <cmath>

#include "sequence_kernels.h"

namespace qwen_metal {
namespace {

struct RopeParameters {
  int heads, kv_heads, D, dims;
  double base, scale;
  float q_eps, k_eps;
  bool gated, has_offsets;
  int offset;
  bool operator==(const RopeParameters&) const = default;
};

// Inputs q, k, v, the two norms' weights (float32), and the rows' offsets where they are an array.
// Outputs q, k, v and, when gated, the gate. v is the input's buffer, seen by heads.
class AttentionPrepare : public PrimitiveWith<RopeParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void allocate(const Arrays&, Arrays& outputs) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (i != 2) {
        CpuPrimitive::allocate(outputs[i]);
      }
    }
  }

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto& p = parameters;
    see_heads(dense_from(inputs[2], 2), outputs[2]);
    const auto q = dense_from(inputs[0], 2), k = dense_from(inputs[1], 2);
    const auto q_norm = contiguous(inputs[3]), k_norm = contiguous(inputs[4]);
    const int* offsets = p.has_offsets ? contiguous(inputs[5]).data<int>() : nullptr;
    const int B = q.shape(0), T = q.shape(1);
    // One of the two: queries or keys.
    struct Part {
      const char* from;
      char* to;
      int64_t row, token;
      Float type;
      int heads, width;
      const float* norm;
      float eps;
    };
    const auto part = [&](const mx::array& a, mx::array& out, int heads, const mx::array& norm, float eps) {
      return Part{
          a.data<char>(),
          out.data<char>(),
          a.strides(0),
          a.strides(1),
          float_of(name(), "", a.dtype()),
          heads,
          a.shape(2) / heads,
          norm.data<float>(),
          eps};
    };
    dispatch([=,
              queries = part(q, outputs[0], p.heads, q_norm, p.q_eps),
              keys = part(k, outputs[1], p.kv_heads, k_norm, p.k_eps),
              gate = p.gated ? outputs[3].data<char>() : nullptr] {
      const auto& kernels = sequence();
      const int half = p.dims / 2, D = p.D;
      for_each_task(int64_t(B) * T, int64_t(B) * T * (p.heads + p.kv_heads) * D * 8, [&](int64_t task) {
        const int64_t b = task / T, t = task % T;
        float* cosine = scratch(2 * half + D);
        float *sine = cosine + half, *x = sine + half;
        const double position = (offsets ? offsets[b] : p.offset) + double(t);
        rope_angles(position, p.scale, std::log(p.base), p.dims, cosine, sine);
        const RopeToken rope = {cosine, sine, D, p.dims};
        for (const Part& part : {queries, keys}) {
          const int64_t size = size_of(part.type);
          const char* from = part.from + (b * part.row + t * part.token) * size;
          for (int64_t h = 0; h < part.heads; ++h, from += part.width * size) {
            kernels.to_float(from, part.type, D, x);
            kernels.prepare_head(rope, part.norm, part.eps, x);
            char* to = part.to + ((b * part.heads + h) * T + t) * D * size;
            kernels.from_float(x, D, part.type, to);
            if (part.width == 2 * D) {  // a head is its query, then its gate
              std::memcpy(gate + (task * part.heads + h) * D * size, from + D * size, D * size);
            }
          }
        }
      });
    });
  }

 private:
  // (B, T, heads * D) as (B, heads, T, D), without a copy.
  void see_heads(const mx::array& v, mx::array& out) {
    const mx::Strides strides = {v.strides(0), parameters.D, v.strides(1), 1};
    mx::array::Flags flags = v.flags();
    flags.row_contiguous = flags.row_contiguous && (out.shape(1) == 1 || out.shape(2) == 1);
    flags.col_contiguous = false;
    out.copy_shared_buffer(v, strides, flags, v.data_size());
  }
};

Arrays attention_prepare(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const mx::array& q_weight,
    const mx::array& k_weight,
    float q_eps,
    float k_eps,
    int dims,
    double base,
    double scale,
    int heads,
    int kv_heads,
    nb::handle offset,
    bool gated) {
  const char* op = "attention_prepare";
  check(q.ndim() == 3 && heads > 0 && kv_heads > 0, op, "q must be (B, T, columns)");
  const int B = q.shape(0), T = q.shape(1), D = q_weight.size();
  check_float(op, "q_norm", q_weight, {D});
  check_float(op, "k_norm", k_weight, {D});
  check_float(op, "q", q, {B, T, heads * D * (gated ? 2 : 1)});
  check_float(op, "k", k, {B, T, kv_heads * D});
  check_float(op, "v", v, {B, T, kv_heads * D});
  check(D > 0 && dims >= 0 && dims % 2 == 0 && dims <= D, op, dims, " of ", D, " dimensions rotate");
  RopeParameters p{heads, kv_heads, D, dims, base, scale, q_eps, k_eps, gated, false, 0};
  Arrays inputs = {q, k, v, as_float32(q_weight), as_float32(k_weight)};
  if (nb::isinstance<mx::array>(offset)) {
    auto offsets = nb::cast<mx::array>(offset);
    check(
        offsets.size() == 1 || offsets.shape() == mx::Shape{B},
        op,
        "offset must be a number or (B,), not ",
        text_of(offsets.shape()));
    p.has_offsets = true;
    offsets = mx::astype(offsets, mx::int32);
    if (offsets.shape() != mx::Shape{B}) {
      offsets = mx::broadcast_to(mx::reshape(offsets, {1}), {B});
    }
    inputs.push_back(offsets);
  } else {
    p.offset = nb::cast<int>(offset);
  }
  std::vector<mx::Shape> shapes = {{B, heads, T, D}, {B, kv_heads, T, D}, {B, kv_heads, T, D}};
  std::vector<mx::Dtype> dtypes = {q.dtype(), k.dtype(), v.dtype()};
  if (gated) {
    shapes.push_back({B, T, heads * D});
    dtypes.push_back(q.dtype());
  }
  return mx::array::make_arrays(
      shapes, dtypes, std::make_shared<AttentionPrepare>(cpu_stream(op), op, p), inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_attention_prepare(nb::module_& m) {
  m.def(
      "attention_prepare",
      [](const mx::array& q,
         const mx::array& k,
         const mx::array& v,
         const mx::array& q_norm,
         const mx::array& k_norm,
         float q_eps,
         float k_eps,
         int dims,
         double base,
         double scale,
         int heads,
         int kv_heads,
         nb::object offset,
         bool gated) {
        return qwen_metal::attention_prepare(
            q, k, v, q_norm, k_norm, q_eps, k_eps, dims, base, scale, heads, kv_heads, offset, gated);
      },
      "q"_a,
      "k"_a,
      "v"_a,
      "q_norm"_a,
      "k_norm"_a,
      "q_eps"_a,
      "k_eps"_a,
      "dims"_a,
      "base"_a,
      "scale"_a,
      "heads"_a,
      "kv_heads"_a,
      "offset"_a,
      "gated"_a);
}
