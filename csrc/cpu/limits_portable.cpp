#include "limits_body.h"

const qwen_metal::LimitKernels qwen_metal::limits_portable = qwen_metal::limit_kernels;
