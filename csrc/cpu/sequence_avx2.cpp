#include "cpu/sequence.h"

namespace qwen_metal {
extern const SequenceKernels sequence_avx2 = sequence_kernels;
}
