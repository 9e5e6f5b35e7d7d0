#include "cpu/sequence.h"

namespace qwen_metal {
extern const SequenceKernels sequence_avx512 = sequence_kernels;
}
