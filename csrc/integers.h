// Integer arrays of any width, read one at a time.
#pragma once

#include "primitive.h"

namespace qwen_metal {

struct Integers {
  const void* data;
  int bytes;
  bool is_signed;

  int64_t operator[](int64_t i) const {
    switch (bytes) {
      case 1:
        return is_signed ? static_cast<const int8_t*>(data)[i] : static_cast<const uint8_t*>(data)[i];
      case 2:
        return is_signed ? static_cast<const int16_t*>(data)[i] : static_cast<const uint16_t*>(data)[i];
      case 4:
        return is_signed ? static_cast<const int32_t*>(data)[i] : static_cast<const uint32_t*>(data)[i];
      default:
        return static_cast<const int64_t*>(data)[i];  // an unsigned one past 2^63 shows as negative
    }
  }
};

inline void check_integers(const char* op, const char* argument, const mx::array& a) {
  check(
      mx::issubdtype(a.dtype(), mx::integer),
      op,
      argument,
      " is ",
      text_of(a.dtype()),
      ", supported are integer dtypes");
}

// Of a row-contiguous array.
inline Integers integers(const mx::array& a) {
  return {a.data<char>(), int(a.itemsize()), mx::issubdtype(a.dtype(), mx::signedinteger)};
}

}  // namespace qwen_metal
