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
        return is_signed ? at<int8_t>(i) : at<uint8_t>(i);
      case 2:
        return is_signed ? at<int16_t>(i) : at<uint16_t>(i);
      case 4:
        return is_signed ? at<int32_t>(i) : at<uint32_t>(i);
      default:
        return at<int64_t>(i);  // an unsigned one past 2^63 shows as negative
    }
  }

 private:
  template <class T>
  int64_t at(int64_t i) const {
    return static_cast<const T*>(data)[i];
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
