#include "owned.h"

#include <cstring>

namespace qwen_metal {
namespace {

// Not equivalent to any other: two ops must never share one.
class Owned : public CpuPrimitive {
 public:
  explicit Owned(mx::Stream stream) : CpuPrimitive(stream, "owned") {}

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    const auto& in = inputs[0];
    if (!in.is_donatable()) {
      // A step still at work on the stream holds the buffer it reads. Without waiting for it, every
      // token would copy the whole cache.
      mx::synchronize(stream());
    }
    if (in.is_donatable() && in.flags().row_contiguous) {
      outputs[0].copy_shared_buffer(in);
    } else {
      CpuPrimitive::allocate(outputs[0]);
    }
  }

  void run(const Arrays& inputs, Arrays& outputs) override {
    char* to = outputs[0].data<char>();
    const auto from = contiguous(inputs[0]);
    if (from.data<char>() != to) {
      dispatch([from = from.data<char>(), to, bytes = outputs[0].nbytes()] {
        std::memcpy(to, from, bytes);
      });
    }
  }
};

}  // namespace

mx::array owned(const char* op, const mx::array& a) {
  return mx::array(a.shape(), a.dtype(), std::make_shared<Owned>(cpu_stream(op)), {a});
}

}  // namespace qwen_metal
