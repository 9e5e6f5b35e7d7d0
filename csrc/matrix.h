// The Matrix of src/qwen_metal/ops/matrix.py on this side: taken apart, checked, and seen by kernels.
#pragma once

#include "cpu/qmm.h"
#include "primitive.h"

namespace qwen_metal {

// The kernels of the instruction set in use.
const QmmKernels& qmm_kernels();

struct MatrixFormat {
  Mode mode;
  int bits, group;
  bool has_bias, has_global_scale;
  int64_t experts, rows, columns;  // experts is 0 for a single matrix

  bool operator==(const MatrixFormat&) const = default;
};

// Appends the arrays of `matrix` to `inputs`. ValueError for a format, shape or dtype that no kernel
// reads; `experts` says whether a stack (E, N, K) or one matrix (N, K) is needed.
MatrixFormat take_matrix(const char* op, nb::handle matrix, bool experts, Arrays& inputs);

// The matrices of an op while its closure runs. Slices of larger arrays are read where they lie.
struct MatrixStack {
  MatrixView first;
  int64_t weight_step, scale_step, bias_step, output_bias_step;  // bytes from one expert to the next
  const float* global_scale;
  int64_t global_scale_step;

  MatrixView expert(int64_t e) const;
};

// Sees the arrays that take_matrix() appended, from inputs[next] on, and moves `next` past them.
MatrixStack view_matrix(const MatrixFormat& f, const Arrays& inputs, size_t& next, CpuPrimitive& op);

// What products with a set of matrices need of the rows.
struct RowsNeeded {
  bool natural = false, nibbles = false, sums[3] = {};

  void add(const MatrixFormat& format, bool few);
};

// Scratch memory of the calling thread, aligned to a cache line, kept for the next call. One use at a
// time for each purpose.
enum class Scratch { rows, norm, gate, up, panel, activation, expert, total };
float* scratch(Scratch purpose, int64_t floats);

// Rows in float32, in every order needed, in scratch memory of the calling thread.
struct RowsSource {
  const char* x;
  Float type;
  int64_t count, columns;
  const char* norm;  // weight of an RMSNorm to apply, or null
  Float norm_type;
  float eps;
};
Rows prepare_rows(const RowsNeeded& needed, const RowsSource& source, Scratch where = Scratch::rows);

// Pieces of the outputs of a matrix for `rows` rows, as the kernels want them: enough for every thread,
// none so small that handing it out costs more than it does.
int64_t output_piece(const MatrixView& m, int64_t rows);

// y (rows, last - first) with stride ldy = rows [row, row + rows) of x times outputs [first, last) of m.
struct Tile {
  float* y;
  int64_t ldy;
};
Tile multiply(
    const MatrixView& m, const Rows& x, int64_t row, int64_t rows, int64_t first, int64_t last, Scratch where);

}  // namespace qwen_metal
