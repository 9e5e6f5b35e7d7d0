#include "limits_body.h"

const qwen_metal::LimitKernels qwen_metal::limits_avx512 = qwen_metal::limit_kernels;
