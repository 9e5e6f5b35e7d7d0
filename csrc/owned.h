// Buffers that an op may write into.
#pragma once

#include "primitive.h"

namespace qwen_metal {

// `a` in a row-contiguous buffer that nothing but the one op made from the result will see: a's own
// where nobody else holds it, else a copy. The op shares it as its output and writes in place.
//
// A node of its own, since the siblings of an op with several outputs all hold its inputs, so that none
// of those ever looks donatable to it.
mx::array owned(const char* op, const mx::array& a);

}  // namespace qwen_metal
