// Quantised matrix times rows: what csrc/matrix.h hands to the kernel of an instruction set.
// Includes no mlx and no standard containers (csrc/README.md).
#pragma once

#include <cstdint>

#include "dtype.h"

namespace qwen_metal {

enum class Mode : uint8_t { dense, affine, mxfp4, mxfp8, nvfp4 };

// One matrix (rows, columns) where it lies; or one expert of a stack.
struct MatrixView {
  const char* weight;    // packed codes (a little-endian bit stream a row), or floats
  int64_t weight_bytes;  // from one row to the next
  const char* scales;    // (rows, columns / group); affine: floats, else e8m0 (mx) or e4m3 (nvfp4)
  const char* biases;    // affine only
  int64_t scale_bytes;   // from one row to the next, of scales
  int64_t bias_bytes;    // and of biases
  const char* bias;      // (rows,) added to the output, or null
  int64_t rows, columns;
  float global_scale;  // nvfp4
  Mode mode;
  Float type;       // of dense weights, or of affine scales
  Float bias_type;  // of `bias`
  uint8_t bits;
  uint8_t group;
};

// Prepared rows of activations, in float32. `nibbles` holds them in the order in which 4-bit codes
// unpack: of 16 columns, 0 8 1 9 ... 7 15. Both are zero from the last column to the next multiple of
// 16. `sums` holds the sums of each 32, 64 and 128 columns.
struct Rows {
  const float* natural;  // null where no matrix asks for it
  const float* nibbles;
  const float* sums[3];
  int64_t columns;
  int64_t stride;        // floats from one row of `natural` and `nibbles` to the next
  const uint32_t* pick;  // row i of a product is row pick[i]; null: row i
  int64_t count;

  int64_t row(int64_t i) const {
    return pick ? pick[i] : i;
  }
};

// Outputs that one call of a kernel computes at most, and rows.
constexpr int64_t kPanelOutputs = 48;
constexpr int64_t kPanelColumns = 1024;
constexpr int64_t kPanelRows = 240;
// Rows a multiple of 4 KiB apart would all fall into the same few cache sets: a line more parts them.
constexpr int64_t kPanelStride = kPanelColumns + 16;
constexpr int64_t kPanelFloats = kPanelOutputs * kPanelStride;

constexpr int64_t row_stride(int64_t columns) {
  const int64_t lines = (columns + 15) / 16;
  return (lines % 64 ? lines : lines + 1) * 16;
}
// Up to this many rows a matrix is read once and never expanded.
constexpr int64_t kFewRows = 8;

struct QmmKernels {
  // y[i * ldy + n - first] = row i of x times row n of m, for n in [first, last). Output bias included.
  // For few rows, any number of outputs.
  void (*few)(const MatrixView& m, const Rows& x, int64_t first, int64_t last, float* y, int64_t ldy);
  // The same for at most kPanelRows rows from `row` on and kPanelOutputs outputs; ldy is kPanelOutputs,
  // `panel` holds kPanelFloats.
  void (*many)(
      const MatrixView& m,
      const Rows& x,
      int64_t row,
      int64_t rows,
      int64_t first,
      int64_t last,
      float* y,
      float* panel);
  // One row: out = in (times norm / rms, where norm is not null), in float32, and the zeros after it.
  void (*prepare)(
      const char* in, Float type, const float* norm, float eps, int64_t columns, float* out);
  void (*to_nibbles)(const float* in, int64_t columns, float* out);
  void (*to_sums)(const float* in, int64_t columns, int group, float* out);
  // gate[i] = silu(gate[i]) * up[i]
  void (*swiglu)(float* gate, const float* up, int64_t n);
  // The floats of one row of a matrix, in the order of its columns.
  void (*expand)(const MatrixView& m, int64_t row, float* out);
  // y[i] += scale * x[i], x of any float type; and y stored as any float type.
  void (*add)(float* y, const char* x, Float type, float scale, int64_t n);
  void (*store)(const float* y, int64_t n, char* out, Float type);
};

extern const QmmKernels qmm_portable, qmm_neon, qmm_avx2, qmm_avx512, qmm_avx512bf16;

// Affine 4- and 8-bit: the formats with a kernel that multiplies codes without expanding them.
inline bool multiplies_codes(const MatrixView& m) {
  return m.mode == Mode::affine && (m.bits == 4 || m.bits == 8);
}
inline bool wants_nibbles(const MatrixView& m) {
  return m.mode == Mode::affine && m.bits == 4;
}

}  // namespace qwen_metal
