// Keys and values as attention takes them: float arrays or quantised triples, checked, and per head.
#pragma once

#include "sequence_kernels.h"

namespace qwen_metal {

// How keys and values are packed; bits 0 is float.
struct KVFormat {
  int bits = 0, group = 0;
  bool operator==(const KVFormat&) const = default;
  int arrays() const {
    return bits ? 3 : 1;
  }
};

// Takes an array or a triple (packed, scales, biases), appends it to `inputs` and gives its (B, H, S).
inline mx::Shape take_kv(
    const char* op, const char* name, nb::handle kv, const KVFormat& format, int D, Arrays& inputs) {
  if (!format.bits) {
    const auto a = nb::cast<mx::array>(kv);
    check(a.ndim() == 4, op, name, " must have 4 axes");
    check_float(op, name, a, {a.shape(0), a.shape(1), a.shape(2), D});
    inputs.push_back(a);
    return {a.shape(0), a.shape(1), a.shape(2)};
  }
  const auto triple = nb::cast<std::vector<mx::array>>(kv);
  check(triple.size() == 3, op, name, " must be packed, scales and biases");
  const auto& packed = triple[0];
  check(packed.ndim() == 4 && packed.dtype() == mx::uint32, op, name, " must be uint32 with 4 axes");
  const mx::Shape shape = {packed.shape(0), packed.shape(1), packed.shape(2)};
  check(
      packed.shape(3) * 32 == D * format.bits && D % format.group == 0,
      op,
      name,
      " has ",
      packed.shape(3),
      " words a row, which is not ",
      D,
      " codes of ",
      format.bits,
      " bits");
  for (int i = 1; i < 3; ++i) {
    check_float(op, name, triple[i], {shape[0], shape[1], shape[2], D / format.group});
  }
  check(triple[1].dtype() == triple[2].dtype(), op, name, "'s scales and biases differ in type");
  inputs.insert(inputs.end(), triple.begin(), triple.end());
  return shape;
}

// `bits` and `group_size` of Python's QuantisedKV, or float for None; and a check of the head size.
inline KVFormat kv_format(const char* op, nb::handle quantised, int D) {
  check(D > 0 && D % 16 == 0, op, "head size ", D, ", supported are multiples of 16");
  if (quantised.is_none()) {
    return {};
  }
  const KVFormat f = {
      nb::cast<int>(quantised.attr("bits")), nb::cast<int>(quantised.attr("group_size"))};
  check(
      (f.bits == 2 || f.bits == 4 || f.bits == 8) &&
          (f.group == 32 || f.group == 64 || f.group == 128),
      op,
      f.bits,
      " bits in groups of ",
      f.group,
      ", supported are 2, 4 and 8 bits in groups of 32, 64 and 128");
  return f;
}

// The arrays of keys or of values as the closure of a task needs them.
struct KVArrays {
  KVFormat format;
  const char *data, *scales, *biases;
  Float type;
  // Bytes from one batch row, head and position to the next: data, scales, biases.
  int64_t batch[3], head[3], position[3];

  KVHead of(int64_t b, int64_t h) const {
    const int64_t item = format.bits ? 1 : size_of(type), width = size_of(type);
    return {
        data + b * batch[0] + h * head[0],
        position[0] / item,
        type,
        format.bits,
        format.group,
        format.bits ? scales + b * batch[1] + h * head[1] : nullptr,
        format.bits ? biases + b * batch[2] + h * head[2] : nullptr,
        position[1] / width,
        position[2] / width};
  }
};

// `arrays`: one, or a triple; rows are dense, other axes may have any stride.
inline KVArrays kv_arrays(const mx::array* arrays, const KVFormat& format) {
  KVArrays kv{};
  kv.format = format;
  const mx::array& typed = arrays[format.bits ? 1 : 0];
  kv.type = float_of("", "", typed.dtype());
  const char** data[] = {&kv.data, &kv.scales, &kv.biases};
  for (int i = 0; i < format.arrays(); ++i) {
    *data[i] = arrays[i].data<char>();
    kv.batch[i] = arrays[i].strides(0) * arrays[i].itemsize();
    kv.head[i] = arrays[i].strides(1) * arrays[i].itemsize();
    kv.position[i] = arrays[i].strides(2) * arrays[i].itemsize();
  }
  return kv;
}

}  // namespace qwen_metal
