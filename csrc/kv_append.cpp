// kv_append: new rows written into a cache's buffers. Contract: src/qwen_metal/ops/kv_append.py.
#include "owned.h"

namespace qwen_metal {
namespace {

struct AppendParameters {
  int position;
  bool operator==(const AppendParameters&) const = default;
};

// Inputs: n owned buffers (B, H, room, D), then their n new rows (B, H, T, D) of the same types. Outputs: the
// buffers with the rows from `position` on.
class Append : public PrimitiveWith<AppendParameters> {
 public:
  using PrimitiveWith::PrimitiveWith;

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].copy_shared_buffer(inputs[i]);
    }
  }

  void run(const Arrays& inputs, Arrays& outputs) override {
    const size_t n = outputs.size();
    for (size_t i = 0; i < n; ++i) {
      const auto rows = dense_from(inputs[n + i], 3);
      dispatch([shape = rows.shape(),
                strides = rows.strides(),
                room = int64_t(outputs[i].shape(2)),
                position = parameters.position,
                item = rows.itemsize(),
                from = rows.data<char>(),
                to = outputs[i].data<char>()] {
        const int64_t width = shape[3] * item;
        for (int64_t b = 0; b < shape[0]; ++b) {
          for (int64_t h = 0; h < shape[1]; ++h) {
            char* row = to + ((b * shape[1] + h) * room + position) * width;
            const char* next = from + (b * strides[0] + h * strides[1]) * item;
            for (int64_t t = 0; t < shape[2]; ++t) {
              std::memcpy(row + t * width, next + t * strides[2] * item, width);
            }
          }
        }
      });
    }
  }
};

Arrays kv_append(const Arrays& buffers, const Arrays& rows, int position) {
  const char* op = "kv_append";
  check(!buffers.empty() && buffers.size() == rows.size(), op, "needs rows for every buffer");
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  Arrays inputs;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto &to = buffers[i], &from = rows[i];
    check(
        to.ndim() == 4 && from.ndim() == 4 && to.shape(0) == from.shape(0) &&
            to.shape(1) == from.shape(1) && to.shape(3) == from.shape(3) && position >= 0 &&
            position + from.shape(2) <= to.shape(2),
        op,
        "rows ",
        text_of(from.shape()),
        " do not fit into ",
        text_of(to.shape()),
        " at ",
        position);
    shapes.push_back(to.shape());
    dtypes.push_back(to.dtype());
    inputs.push_back(owned(op, to));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    inputs.push_back(mx::astype(rows[i], buffers[i].dtype()));
  }
  return mx::array::make_arrays(
      shapes,
      dtypes,
      std::make_shared<Append>(cpu_stream(op), op, AppendParameters{position}),
      inputs);
}

}  // namespace
}  // namespace qwen_metal

void init_kv_append(nb::module_& m) {
  m.def("kv_append", &qwen_metal::kv_append, "buffers"_a, "rows"_a, "position"_a);
}
