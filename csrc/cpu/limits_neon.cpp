#include "limits_body.h"

const qwen_metal::LimitKernels qwen_metal::limits_neon = qwen_metal::limit_kernels;
