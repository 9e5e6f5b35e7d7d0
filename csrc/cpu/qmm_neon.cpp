#include "qmm_body.h"

const qwen_metal::QmmKernels qwen_metal::qmm_neon = qwen_metal::kernels;
