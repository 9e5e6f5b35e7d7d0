#include "cpu/sequence.h"

namespace qwen_metal {
extern const SequenceKernels sequence_neon = sequence_kernels;
}
