#include "qmm_body.h"

const qwen_metal::QmmKernels qwen_metal::qmm_portable = qwen_metal::kernels;
