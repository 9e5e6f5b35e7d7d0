#include "qmm_body.h"

const qwen_metal::QmmKernels qwen_metal::qmm_avx512 = qwen_metal::kernels;
