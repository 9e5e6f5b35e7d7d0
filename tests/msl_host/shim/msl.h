// The Metal Shading Language as C++ for OpenCL (clang -x clcpp), compiled for the host.
// Each header of this folder holds one subject; the runtime behind msl_* is in ../runtime.
#pragma once
#include "msl_types.h"
#include "msl_vectors.h"  // written by vectors.py
#include "msl_runtime.h"
#include "msl_traits.h"
#include "msl_math.h"
#include "msl_integer.h"
#include "msl_simd.h"
#include "msl_matrix.h"
#include "msl_atomic.h"
#include "msl_tensor.h"
#include "msl_builtins.h"
#include "msl_bind.h"
