#include "cpu/sequence.h"

namespace qwen_metal {
extern const SequenceKernels sequence_portable = sequence_kernels;
}
