// <metal_math>: every function in metal::, metal::fast:: and metal::precise:: is the C library's.
#pragma once
namespace metal {

// One-argument function: float, half (through float), and their vectors.
#define MSL_MATH1(name, expression)                                   \
  MSL_F inline float name(float x) { return expression; }             \
  MSL_F inline half name(half h) {                                    \
    float x = (float)h;                                               \
    return (half)(expression);                                        \
  }                                                                   \
  template <class T, int N>                                           \
  MSL_F vec<T, N> name(vec<T, N> v) {                                 \
    vec<T, N> r;                                                      \
    for (int i = 0; i < N; i++) r[i] = name(v[i]);                    \
    return r;                                                         \
  }
#define MSL_MATH2(name, expression)                                   \
  MSL_F inline float name(float x, float y) { return expression; }    \
  MSL_F inline half name(half hx, half hy) {                          \
    float x = (float)hx, y = (float)hy;                               \
    return (half)(expression);                                        \
  }                                                                   \
  template <class T, int N>                                           \
  MSL_F vec<T, N> name(vec<T, N> a, vec<T, N> b) {                    \
    vec<T, N> r;                                                      \
    for (int i = 0; i < N; i++) r[i] = name(a[i], b[i]);              \
    return r;                                                         \
  }
#define MSL_MATH_FUNCTIONS                              \
  MSL_MATH1(exp, expf(x))                               \
  MSL_MATH1(exp2, exp2f(x))                             \
  MSL_MATH1(exp10, exp10f(x))                           \
  MSL_MATH1(log, logf(x))                               \
  MSL_MATH1(log2, log2f(x))                             \
  MSL_MATH1(log10, log10f(x))                           \
  MSL_MATH1(sin, sinf(x))                               \
  MSL_MATH1(cos, cosf(x))                               \
  MSL_MATH1(tan, tanf(x))                               \
  MSL_MATH1(asin, asinf(x))                             \
  MSL_MATH1(acos, acosf(x))                             \
  MSL_MATH1(atan, atanf(x))                             \
  MSL_MATH1(sinh, sinhf(x))                             \
  MSL_MATH1(cosh, coshf(x))                             \
  MSL_MATH1(tanh, tanhf(x))                             \
  MSL_MATH1(asinh, asinhf(x))                           \
  MSL_MATH1(acosh, acoshf(x))                           \
  MSL_MATH1(atanh, atanhf(x))                           \
  MSL_MATH1(sinpi, sinf(M_PI_F* x))                     \
  MSL_MATH1(cospi, cosf(M_PI_F* x))                     \
  MSL_MATH1(tanpi, tanf(M_PI_F* x))                     \
  MSL_MATH1(sqrt, __builtin_sqrtf(x))                   \
  MSL_MATH1(rsqrt, 1.0f / __builtin_sqrtf(x))           \
  MSL_MATH1(floor, __builtin_floorf(x))                 \
  MSL_MATH1(ceil, __builtin_ceilf(x))                   \
  MSL_MATH1(trunc, __builtin_truncf(x))                 \
  MSL_MATH1(rint, __builtin_rintf(x))                   \
  MSL_MATH1(round, __builtin_roundf(x))                 \
  MSL_MATH1(fabs, __builtin_fabsf(x))                   \
  MSL_MATH1(fract, x - __builtin_floorf(x))             \
  MSL_MATH2(pow, powf(x, y))                            \
  MSL_MATH2(powr, powf(x, y))                           \
  MSL_MATH2(fmod, fmodf(x, y))                          \
  MSL_MATH2(atan2, atan2f(x, y))                        \
  MSL_MATH2(fmin, __builtin_fminf(x, y))                \
  MSL_MATH2(fmax, __builtin_fmaxf(x, y))                \
  MSL_MATH2(copysign, __builtin_copysignf(x, y))        \
  MSL_MATH2(divide, x / y)                              \
  MSL_MATH2(nextafter, nextafterf(x, y))                \
  MSL_MATH2(fdim, (x > y ? x - y : 0.0f))               \
  MSL_F inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }                    \
  MSL_F inline half fma(half a, half b, half c) { return (half)((double)a * (double)b + (double)c); }      \
  template <class T, int N>                                                                                \
  MSL_F vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {                                             \
    vec<T, N> r;                                                                                           \
    for (int i = 0; i < N; i++) r[i] = fma(a[i], b[i], c[i]);                                              \
    return r;                                                                                              \
  }

MSL_MATH_FUNCTIONS
namespace fast {
MSL_MATH_FUNCTIONS
}
namespace precise {
MSL_MATH_FUNCTIONS
}
#undef MSL_MATH_FUNCTIONS
#undef MSL_MATH1
#undef MSL_MATH2

#define MSL_FLOAT_FUNCTIONS(T)                                                                      \
  MSL_F inline T max(T a, T b) { return fmax(a, b); }                                               \
  MSL_F inline T min(T a, T b) { return fmin(a, b); }                                               \
  MSL_F inline T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); }                     \
  MSL_F inline T abs(T a) { return fabs(a); }                                                       \
  MSL_F inline T saturate(T x) { return clamp(x, T(0), T(1)); }                                     \
  MSL_F inline T mix(T a, T b, T w) { return a + (b - a) * w; }                                     \
  MSL_F inline T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); }                    \
  MSL_F inline T step(T edge, T x) { return x < edge ? T(0) : T(1); }                               \
  MSL_F inline T fmin3(T a, T b, T c) { return fmin(a, fmin(b, c)); }                               \
  MSL_F inline T fmax3(T a, T b, T c) { return fmax(a, fmax(b, c)); }                               \
  MSL_F inline T min3(T a, T b, T c) { return fmin3(a, b, c); }                                     \
  MSL_F inline T max3(T a, T b, T c) { return fmax3(a, b, c); }                                     \
  MSL_F inline T fmedian3(T a, T b, T c) { return fmax(fmin(a, b), fmin(fmax(a, b), c)); }          \
  MSL_F inline T ldexp(T x, int e) { return (T)__builtin_ldexpf((float)x, e); }
MSL_FLOAT_FUNCTIONS(float)
MSL_FLOAT_FUNCTIONS(half)
#undef MSL_FLOAT_FUNCTIONS

#define MSL_CLASSIFY(T)                                                          \
  MSL_F inline bool isnan(T x) { return x != x; }                                \
  MSL_F inline bool isinf(T x) { return __builtin_isinf((float)x); }             \
  MSL_F inline bool isfinite(T x) { return __builtin_isfinite((float)x); }       \
  MSL_F inline bool isnormal(T x) { return __builtin_isnormal((float)x); }       \
  MSL_F inline bool signbit(T x) { return __builtin_signbit((float)x); }
MSL_CLASSIFY(float)
MSL_CLASSIFY(half)
MSL_CLASSIFY(bfloat)
#undef MSL_CLASSIFY

// Exponent and mantissa by bits: a library call would write memory behind the checker's back.
MSL_F inline float frexp(float x, int& exponent) {
  exponent = 0;
  if (x == 0.0f || !__builtin_isfinite(x)) return x;
  float scaled = __builtin_fabsf(x) < FLT_MIN ? x * 0x1p64f : x;
  uint bits = as_type<uint>(scaled);
  exponent = (int)(bits >> 23 & 255) - 126 - (scaled != x ? 64 : 0);
  return as_type<float>((bits & 0x807fffffu) | 0x3f000000u);
}
MSL_F inline half frexp(half x, int& exponent) { return (half)frexp((float)x, exponent); }

template <class T, int N>
MSL_F T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
MSL_F T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
MSL_F T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}

namespace fast {
using metal::abs;
using metal::clamp;
using metal::isnan;
using metal::max;
using metal::min;
}  // namespace fast
namespace precise {
using metal::abs;
using metal::clamp;
using metal::isnan;
using metal::max;
using metal::min;
}  // namespace precise
}  // namespace metal
