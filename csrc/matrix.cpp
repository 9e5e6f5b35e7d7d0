#include "matrix.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cpu_features.h"

namespace qwen_metal {

const QmmKernels& qmm_kernels() {
  return *choose<const QmmKernels*>({
      {Isa::portable, &qmm_portable},
#if defined(QWEN_METAL_NEON)
      {Isa::neon, &qmm_neon},
#endif
#if defined(QWEN_METAL_AVX2)
      {Isa::avx2, &qmm_avx2},
#endif
#if defined(QWEN_METAL_AVX512)
      {Isa::avx512, &qmm_avx512},
#endif
  });
}

static Mode mode_of(const char* op, const std::string& name) {
  if (name == "float") {
    return Mode::dense;
  }
  if (name == "affine") {
    return Mode::affine;
  }
  if (name == "mxfp4") {
    return Mode::mxfp4;
  }
  if (name == "mxfp8") {
    return Mode::mxfp8;
  }
  check(
      name == "nvfp4", op, "mode is ", name, ", supported are float, affine, mxfp4, mxfp8, nvfp4");
  return Mode::nvfp4;
}

static bool packable(Mode mode, int bits, int group) {
  switch (mode) {
    case Mode::affine:
      return (bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8) &&
          (group == 32 || group == 64 || group == 128);
    case Mode::mxfp4:
      return bits == 4 && group == 32;
    case Mode::mxfp8:
      return bits == 8 && group == 32;
    case Mode::nvfp4:
      return bits == 4 && group == 16;
    default:
      return true;
  }
}

// (E, N, last) of a stack, (N, last) of a single matrix.
static mx::Shape shape_with(const MatrixFormat& f, int64_t last) {
  mx::Shape shape;
  if (f.experts) {
    shape.push_back(f.experts);
  }
  shape.push_back(f.rows);
  if (last) {
    shape.push_back(last);
  }
  return shape;
}

MatrixFormat take_matrix(const char* op, nb::handle matrix, bool experts, Arrays& inputs) {
  // In the order of the fields of ops/matrix.py.
  const auto fields = nb::cast<nb::tuple>(matrix);
  check(fields.size() == 8, op, "a Matrix has 8 fields, got ", fields.size());
  const auto array = [&](int i) {
    return fields[i].is_none() ? std::nullopt : std::optional(nb::cast<mx::array>(fields[i]));
  };
  const auto weight = nb::cast<mx::array>(fields[0]);
  const auto scales = array(1), biases = array(2), bias = array(3), global_scale = array(4);

  MatrixFormat f;
  f.mode = mode_of(op, nb::cast<std::string>(fields[7]));
  f.bits = nb::cast<int>(fields[6]);
  f.group = nb::cast<int>(fields[5]);
  f.has_bias = bias.has_value();
  f.has_global_scale = global_scale.has_value() && f.mode == Mode::nvfp4;
  check(
      packable(f.mode, f.bits, f.group), op, f.bits, " bits in groups of ", f.group, " have no kernel");
  const size_t axes = experts ? 3 : 2;
  check(
      weight.ndim() == axes, op, "weight is ", text_of(weight.shape()), ", needed are ", axes, " axes");
  f.experts = experts ? weight.shape(0) : 0;
  f.rows = weight.shape(-2);
  check(!experts || f.experts > 0, op, "weight is ", text_of(weight.shape()), ", of no experts");
  inputs.push_back(weight);

  if (f.mode == Mode::dense) {
    f.columns = weight.shape(-1);
    float_of(op, "weight", weight.dtype());
  } else {
    check(
        weight.dtype() == mx::uint32, op, "weight is ", text_of(weight.dtype()), ", needed is uint32");
    const int64_t code_bits = int64_t(weight.shape(-1)) * 32;
    f.columns = code_bits / f.bits;
    check(
        code_bits % f.bits == 0 && f.columns % f.group == 0 && f.columns > 0,
        op,
        "weight is ",
        text_of(weight.shape()),
        ", no whole number of groups of ",
        f.group);
    const bool affine = f.mode == Mode::affine;
    check(
        scales.has_value() && biases.has_value() == affine,
        op,
        "affine formats have scales and biases, the others scales alone");
    const auto needed = shape_with(f, f.columns / f.group);
    if (affine) {
      check_float(op, "scales", *scales, needed);
      check_float(op, "biases", *biases, needed);
      check(scales->dtype() == biases->dtype(), op, "scales and biases differ in dtype");
      inputs.push_back(*scales);
      inputs.push_back(*biases);
    } else {
      check(
          scales->dtype() == mx::uint8 && scales->shape() == needed,
          op,
          "scales are ",
          text_of(scales->dtype()),
          " ",
          text_of(scales->shape()),
          ", needed are uint8 ",
          text_of(needed));
      inputs.push_back(*scales);
    }
  }
  if (bias) {
    check_float(op, "bias", *bias, shape_with(f, 0));
    inputs.push_back(*bias);
  }
  if (f.has_global_scale) {
    check(
        global_scale->dtype() == mx::float32 &&
            (global_scale->size() == 1 || int64_t(global_scale->size()) == f.experts),
        op,
        "global_scale is ",
        text_of(global_scale->dtype()),
        " ",
        text_of(global_scale->shape()),
        ", needed is one float32, or one an expert");
    inputs.push_back(*global_scale);
  }
  return f;
}

MatrixStack view_matrix(const MatrixFormat& f, const Arrays& inputs, size_t& next, CpuPrimitive& op) {
  MatrixStack stack{};
  MatrixView& m = stack.first;
  m.mode = f.mode;
  m.bits = f.bits;
  m.group = f.group;
  m.rows = f.rows;
  m.columns = f.columns;
  m.global_scale = 1.0f;
  // Only the last axis must be dense.
  const auto see = [&](const char*& data, int64_t& row_bytes, int64_t& step) {
    const auto a = op.dense_from(inputs[next++], f.experts ? 2 : 1);
    data = a.data<char>();
    row_bytes = a.strides(-2) * a.itemsize();
    step = f.experts ? a.strides(0) * a.itemsize() : 0;
    return a.dtype();
  };
  const auto weight_type = see(m.weight, m.weight_bytes, stack.weight_step);
  if (f.mode == Mode::dense) {
    m.type = float_of(op.name(), "weight", weight_type);
  } else {
    const auto type = see(m.scales, m.scale_bytes, stack.scale_step);
    if (f.mode == Mode::affine) {
      m.type = float_of(op.name(), "scales", type);
      see(m.biases, m.bias_bytes, stack.bias_step);
    }
  }
  if (f.has_bias) {
    const auto a = op.contiguous(inputs[next++]);
    m.bias = a.data<char>();
    m.bias_type = float_of(op.name(), "bias", a.dtype());
    stack.output_bias_step = f.experts ? f.rows * a.itemsize() : 0;
  }
  if (f.has_global_scale) {
    const auto a = op.contiguous(inputs[next++]);
    stack.global_scale = a.data<float>();
    stack.global_scale_step = a.size() == 1 ? 0 : 1;
  }
  return stack;
}

MatrixView MatrixStack::expert(int64_t e) const {
  MatrixView m = first;
  m.weight += e * weight_step;
  m.scales += m.scales ? e * scale_step : 0;
  m.biases += m.biases ? e * bias_step : 0;
  m.bias += m.bias ? e * output_bias_step : 0;
  if (global_scale) {
    m.global_scale = global_scale[e * global_scale_step];
  }
  return m;
}

void RowsNeeded::add(const MatrixFormat& f, bool few) {
  const bool affine = f.mode == Mode::affine;
  (affine && f.bits == 4 ? nibbles : natural) = true;
  if (few && affine && (f.bits == 4 || f.bits == 8)) {
    sums[f.group == 32 ? 0 : f.group == 64 ? 1 : 2] = true;
  }
}

float* scratch(Scratch purpose, int64_t floats) {
  struct Free {
    void operator()(float* p) const {
      std::free(p);
    }
  };
  struct Buffer {
    std::unique_ptr<float, Free> data;
    int64_t size = 0;
  };
  thread_local Buffer buffers[8];
  Buffer& b = buffers[static_cast<int>(purpose)];
  // What one large prompt needed is given back at the next call that needs far less.
  constexpr int64_t keep = int64_t(1) << 22;
  if (b.size < floats || (b.size > keep && floats < b.size / 8)) {
    const int64_t size = (std::max<int64_t>(floats, 1024) + 15) / 16 * 16;
    b.data.reset();
    b.data.reset(static_cast<float*>(std::aligned_alloc(64, size * sizeof(float))));
    if (!b.data) {
      b.size = 0;
      throw std::bad_alloc();
    }
    b.size = size;
  }
  return b.data.get();
}

Rows prepare_rows(const RowsNeeded& needed, const RowsSource& source, Scratch where) {
  const QmmKernels& k = qmm_kernels();
  const int64_t rows = source.count, columns = source.columns;
  const float* norm = nullptr;
  if (source.norm) {
    float* weight = scratch(Scratch::norm, columns);
    load_floats(source.norm, source.norm_type, 0, columns, weight);
    norm = weight;
  }
  constexpr int groups[3] = {32, 64, 128};
  const int64_t stride = row_stride(columns);
  int64_t floats = rows * stride * (needed.nibbles ? 2 : 1);
  for (int i = 0; i < 3; ++i) {
    floats += needed.sums[i] ? rows * (columns / groups[i]) : 0;
  }
  float* natural = scratch(where, floats);
  float* nibbles = natural + rows * stride;
  float* end = nibbles + (needed.nibbles ? rows * stride : 0);
  float* sums[3] = {};
  for (int i = 0; i < 3; ++i) {
    if (needed.sums[i]) {
      sums[i] = end;
      end += rows * (columns / groups[i]);
    }
  }
  const int64_t row_bytes = columns * size_of(source.type);
  const int64_t pieces = std::min<int64_t>(rows, rows * columns < 65536 ? 1 : 4 * thread_count());
  parallel_for(pieces, [&](int64_t i) {
    const Range part = piece(rows, pieces, i);
    for (int64_t r = part.begin; r < part.end; ++r) {
      float* row = natural + r * stride;
      k.prepare(source.x + r * row_bytes, source.type, norm, source.eps, columns, row);
      if (needed.nibbles) {
        k.to_nibbles(row, columns, nibbles + r * stride);
      }
      for (int s = 0; s < 3; ++s) {
        if (sums[s]) {
          k.to_sums(row, columns, groups[s], sums[s] + r * (columns / groups[s]));
        }
      }
    }
  });
  return Rows{natural, nibbles, {sums[0], sums[1], sums[2]}, columns, stride, nullptr, rows};
}

int64_t output_piece(const MatrixView& m, int64_t rows) {
  if (rows > kFewRows) {
    return kPanelOutputs;
  }
  constexpr int64_t bytes = 32768;
  const int64_t by_size = bytes / std::max<int64_t>(m.weight_bytes, 1) + 1;
  const int64_t by_threads = m.rows / (4 * thread_count()) + 1;
  return std::min<int64_t>(std::max(by_size, by_threads), 512);
}

Tile multiply(
    const MatrixView& m, const Rows& x, int64_t row, int64_t rows, int64_t first, int64_t last, Scratch where) {
  const QmmKernels& k = qmm_kernels();
  if (x.count <= kFewRows) {
    const int64_t ldy = (last - first + 15) / 16 * 16;
    float* y = scratch(where, kFewRows * ldy);
    k.few(m, x, first, last, y, ldy);
    return {y, ldy};
  }
  float* y = scratch(where, kPanelRows * kPanelOutputs);
  k.many(m, x, row, rows, first, last, y, scratch(Scratch::panel, kPanelFloats));
  return {y, kPanelOutputs};
}

}  // namespace qwen_metal
