// Compiler builtins that MLX's headers name directly (__metal_exp and the like).
#pragma once

#define MSL_BUILTIN1(name) \
  MSL_F inline float __metal_##name(float x, int = 0) { return metal::name(x); }
MSL_BUILTIN1(exp)
MSL_BUILTIN1(exp2)
MSL_BUILTIN1(exp10)
MSL_BUILTIN1(log)
MSL_BUILTIN1(log2)
MSL_BUILTIN1(log10)
MSL_BUILTIN1(sin)
MSL_BUILTIN1(cos)
MSL_BUILTIN1(tan)
MSL_BUILTIN1(asin)
MSL_BUILTIN1(acos)
MSL_BUILTIN1(atan)
MSL_BUILTIN1(sinh)
MSL_BUILTIN1(cosh)
MSL_BUILTIN1(tanh)
MSL_BUILTIN1(asinh)
MSL_BUILTIN1(acosh)
MSL_BUILTIN1(atanh)
MSL_BUILTIN1(sqrt)
MSL_BUILTIN1(rsqrt)
MSL_BUILTIN1(floor)
MSL_BUILTIN1(ceil)
MSL_BUILTIN1(trunc)
MSL_BUILTIN1(rint)
MSL_BUILTIN1(round)
MSL_BUILTIN1(fabs)
MSL_BUILTIN1(fract)
MSL_BUILTIN1(sinpi)
MSL_BUILTIN1(cospi)
MSL_BUILTIN1(tanpi)
#undef MSL_BUILTIN1

#define MSL_BUILTIN2(name) \
  MSL_F inline float __metal_##name(float x, float y, int = 0) { return metal::name(x, y); }
MSL_BUILTIN2(pow)
MSL_BUILTIN2(powr)
MSL_BUILTIN2(fmod)
MSL_BUILTIN2(atan2)
MSL_BUILTIN2(fmin)
MSL_BUILTIN2(fmax)
MSL_BUILTIN2(divide)
MSL_BUILTIN2(nextafter)
#undef MSL_BUILTIN2

MSL_F inline float __metal_fma(float a, float b, float c, int = 0) { return metal::fma(a, b, c); }
MSL_F inline float __metal_fmin3(float a, float b, float c, int = 0) { return metal::fmin3(a, b, c); }
MSL_F inline float __metal_fmax3(float a, float b, float c, int = 0) { return metal::fmax3(a, b, c); }
MSL_F inline float __metal_fmedian3(float a, float b, float c, int = 0) { return metal::fmedian3(a, b, c); }
MSL_F inline float __metal_ldexp(float x, int e, int = 0) { return metal::ldexp(x, e); }
MSL_F inline float __metal_frexp(float x, int* exponent) {
  int e;
  float mantissa = metal::frexp(x, e);
  *exponent = e;
  return mantissa;
}

#define MSL_BUILTIN_SIMD1(name) \
  template <class T>            \
  MSL_SIMD T __metal_##name(T value) { return metal::name(value); }
MSL_BUILTIN_SIMD1(simd_sum)
MSL_BUILTIN_SIMD1(simd_product)
MSL_BUILTIN_SIMD1(simd_max)
MSL_BUILTIN_SIMD1(simd_min)
MSL_BUILTIN_SIMD1(simd_xor)
MSL_BUILTIN_SIMD1(simd_prefix_inclusive_sum)
MSL_BUILTIN_SIMD1(simd_prefix_exclusive_sum)
MSL_BUILTIN_SIMD1(simd_prefix_inclusive_product)
MSL_BUILTIN_SIMD1(simd_prefix_exclusive_product)
#undef MSL_BUILTIN_SIMD1

#define MSL_BUILTIN_SIMD2(name) \
  template <class T>            \
  MSL_SIMD T __metal_##name(T value, ushort by) { return metal::name(value, by); }
MSL_BUILTIN_SIMD2(simd_shuffle)
MSL_BUILTIN_SIMD2(simd_broadcast)
MSL_BUILTIN_SIMD2(simd_shuffle_xor)
MSL_BUILTIN_SIMD2(simd_shuffle_up)
MSL_BUILTIN_SIMD2(simd_shuffle_down)
MSL_BUILTIN_SIMD2(simd_shuffle_rotate_up)
MSL_BUILTIN_SIMD2(simd_shuffle_rotate_down)
#undef MSL_BUILTIN_SIMD2

template <class T>
MSL_SIMD T __metal_simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_up(value, filling, delta, modulo);
}
template <class T>
MSL_SIMD T __metal_simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo) {
  return metal::simd_shuffle_and_fill_down(value, filling, delta, modulo);
}
MSL_F inline ushort __metal_get_simdgroup_size(ushort) { return 32; }
MSL_F inline uint __metal_get_thread_index_in_simdgroup(uint) { return msl_lane(); }
MSL_F inline ushort __metal_get_thread_index_in_simdgroup(ushort) { return (ushort)msl_lane(); }
