#include "limits_body.h"

const qwen_metal::LimitKernels qwen_metal::limits_avx2 = qwen_metal::limit_kernels;
