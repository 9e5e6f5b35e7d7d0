// The quantised products of one instruction set against double precision, without mlx or Python, so that
// they run under an emulator: `make test-neon`. KERNELS names the set.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "cpu/codes.h"

using namespace qwen_metal;

static std::mt19937 random_bits(1);

static double code_of(const char* row, int bits, int64_t i) {
  unsigned value = 0;
  for (int b = 0; b < bits; ++b) {
    const int64_t at = i * bits + b;
    value |= unsigned(static_cast<unsigned char>(row[at / 8]) >> (at % 8) & 1) << b;
  }
  return value;
}

// Largest relative error of a format over several numbers of rows.
static double worst(int bits, int group, int64_t columns) {
  constexpr int64_t outputs = 37;
  const int64_t groups = columns / group, bytes = columns * bits / 8;
  std::vector<char> weight(outputs * bytes);
  std::vector<float> scales(outputs * groups), biases(outputs * groups);
  for (auto& w : weight) {
    w = char(random_bits());
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = 0.01f + random_bits() % 100 * 1e-4f;
    biases[i] = -scales[i] * float(1 << (bits - 1));
  }
  MatrixView m{};
  m.weight = weight.data();
  m.weight_bytes = bytes;
  m.scales = reinterpret_cast<char*>(scales.data());
  m.biases = reinterpret_cast<char*>(biases.data());
  m.scale_bytes = m.bias_bytes = groups * sizeof(float);
  m.rows = outputs;
  m.columns = columns;
  m.global_scale = 1.0f;
  m.mode = Mode::affine;
  m.type = Float::f32;
  m.bits = bits;
  m.group = group;

  double largest = 0.0;
  for (int64_t rows : {1, 2, 3, 4, 5, 8, 9, 13, 31}) {
    const int64_t stride = row_stride(columns);
    std::vector<float> x(rows * columns), natural(rows * stride), nibbles(rows * stride);
    std::vector<float> sums(rows * groups), y(kPanelRows * kPanelOutputs), panel(kPanelFloats);
    for (auto& value : x) {
      value = float(int(random_bits() % 2001) - 1000) / 500.0f;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const char* in = reinterpret_cast<char*>(x.data() + r * columns);
      KERNELS.prepare(in, Float::f32, nullptr, 0.0f, columns, natural.data() + r * stride);
      KERNELS.to_nibbles(natural.data() + r * stride, columns, nibbles.data() + r * stride);
      KERNELS.to_sums(natural.data() + r * stride, columns, group, sums.data() + r * groups);
    }
    const float* s = sums.data();
    const Rows prepared{natural.data(), nibbles.data(), {s, s, s}, columns, stride, nullptr, rows};
    if (rows <= kFewRows) {
      KERNELS.few(m, prepared, 0, outputs, y.data(), kPanelOutputs);
    } else {
      KERNELS.many(m, prepared, 0, rows, 0, outputs, y.data(), panel.data());
    }
    double error = 0.0, size = 0.0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t n = 0; n < outputs; ++n) {
        double exact = 0.0;
        for (int64_t k = 0; k < columns; ++k) {
          const int64_t at = n * groups + k / group;
          exact += x[r * columns + k] *
              (code_of(m.weight + n * bytes, bits, k) * double(scales[at]) + double(biases[at]));
        }
        error += std::pow(y[r * kPanelOutputs + n] - exact, 2);
        size += exact * exact;
      }
    }
    largest = std::max(largest, std::sqrt(error / size));
  }
  return largest;
}

int main() {
  bool good = true;
  for (int bits : {2, 3, 4, 5, 6, 8}) {
    for (int group : {32, 64, 128}) {
      for (int64_t columns : {128, 1152}) {
        const double error = worst(bits, group, columns);
        good = good && error <= 1e-6;
        std::printf("affine %d-bit group %-3d columns %-4ld error %.2e %s\n", bits, group, long(columns), error,
                    error <= 1e-6 ? "" : "WRONG");
      }
    }
  }
  // The float types and the activation.
  for (float value : {0.0f, 1.0f, -2.5f, 65504.0f, 6e-8f, 1e-5f, 3.14159f}) {
    good = good && std::abs(f16_to_float(float_to_f16(value)) - value) <= std::abs(value) * 5e-4f + 3e-8f;
    good = good && std::abs(bf16_to_float(float_to_bf16(value)) - value) <= std::abs(value) * 4e-3f;
  }
  for (float value = -100.0f; value < 100.0f; value += 0.37f) {
    float gate[5] = {value, value, value, value, value}, up[5] = {1, 1, 1, 1, 1};
    KERNELS.swiglu(gate, up, 5);
    const double exact = value / (1.0 + std::exp(-double(value)));
    for (float g : gate) {
      good = good && std::abs(g - exact) <= 1e-6 * std::abs(exact) + 1e-30;
    }
  }
  std::printf(good ? "all right\n" : "WRONG\n");
  return good ? 0 : 1;
}
