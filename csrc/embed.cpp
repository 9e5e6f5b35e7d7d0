// Rows of a (quantised) embedding table.
#include "integers.h"
#include "matrix.h"

namespace qwen_metal {
namespace {

class Embed : public PrimitiveWith<MatrixFormat> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void run(const Arrays& inputs, Arrays& outputs) override {
    const auto ids = contiguous(inputs[0]);
    size_t next = 1;
    const auto table = view_matrix(parameters, inputs, next, *this);
    dispatch([=,
              this_name = name(),
              count = int64_t(ids.size()),
              ids = integers(ids),
              out = outputs[0].data<char>(),
              type = float_of(name(), "output", outputs[0].dtype())] {
      const MatrixView m = table.expert(0);
      const int64_t row_bytes = m.columns * size_of(type);
      const int64_t pieces = count * m.columns < 65536 ? 1 : 4 * thread_count();
      parallel_for(pieces, [&](int64_t i) {
        const QmmKernels& kernels = qmm_kernels();
        float* row = scratch(Scratch::gate, m.columns);
        const Range part = piece(count, pieces, i);
        for (int64_t r = part.begin; r < part.end; ++r) {
          int64_t id = ids[r];
          id += id < 0 ? m.rows : 0;  // from the end, as in mx.take
          check(id >= 0 && id < m.rows, this_name, "id ", ids[r], " is outside a table of ", m.rows);
          kernels.expand(m, id, row);
          kernels.store(row, m.columns, out + r * row_bytes, type);
        }
      });
    });
  }
};

mx::array embed(const mx::array& ids, nb::handle table) {
  const char* op = "embed";
  check_integers(op, "ids", ids);
  Arrays inputs{ids};
  const auto format = take_matrix(op, table, false, inputs);
  const auto dtype = format.mode == Mode::dense ? inputs[1].dtype()
      : format.mode == Mode::affine             ? inputs[2].dtype()
                                                : mx::bfloat16;
  auto shape = ids.shape();
  shape.push_back(format.columns);
  return mx::array(shape, dtype, std::make_shared<Embed>(cpu_stream(op), op, format), inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_embed(nb::module_& m) {
  m.def("embed", &qwen_metal::embed, "ids"_a, "table"_a);
}
