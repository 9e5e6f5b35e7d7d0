// Vec: the float vector of the instruction set this file is compiled for, so that a kernel body is
// written once. Unnamed namespace: see csrc/README.md.
#pragma once

#include <cstdint>

#include "dtype.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace qwen_metal {
namespace {

#if defined(__AVX512F__)

struct Vec {
  static constexpr int width = 16;
  static constexpr int registers = 32;
  __m512 v;

  static Vec of(float x) {
    return {_mm512_set1_ps(x)};
  }
  static Vec load(const float* p) {
    return {_mm512_loadu_ps(p)};
  }
  static Vec load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
  }
  static Vec load_i8(const int8_t* p) {
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtepi32_ps(wide)};
  }
  static Vec load_u8(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_cvtepi32_ps(wide)};
  }
  void store(float* p) const {
    _mm512_storeu_ps(p, v);
  }
};

inline Vec operator+(Vec a, Vec b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {  // b where either is NaN
  return {_mm512_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline Vec round(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec times_power_of_2(Vec a, Vec n) {  // n an integer from -126 to 127
  return {_mm512_scalef_ps(a.v, n.v)};
}
inline float sum(Vec a) {
  return _mm512_reduce_add_ps(a.v);
}
inline float largest(Vec a) {
  return _mm512_reduce_max_ps(a.v);
}

#elif defined(__AVX2__)

struct Vec {
  static constexpr int width = 8;
  static constexpr int registers = 16;
  __m256 v;

  static Vec of(float x) {
    return {_mm256_set1_ps(x)};
  }
  static Vec load(const float* p) {
    return {_mm256_loadu_ps(p)};
  }
  static Vec load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static Vec load_i8(const int8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtepi32_ps(wide)};
  }
  static Vec load_u8(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_cvtepi32_ps(wide)};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, v);
  }
};

inline Vec operator+(Vec a, Vec b) {
  return {_mm256_add_ps(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {_mm256_div_ps(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline Vec max(Vec a, Vec b) {  // b where either is NaN
  return {_mm256_max_ps(a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {_mm256_min_ps(a.v, b.v)};
}
inline Vec round(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vec times_power_of_2(Vec a, Vec n) {  // n an integer from -126 to 127
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

#elif defined(__ARM_NEON)

struct Vec {
  static constexpr int width = 4;
  static constexpr int registers = 32;
  float32x4_t v;

  static Vec of(float x) {
    return {vdupq_n_f32(x)};
  }
  static Vec load(const float* p) {
    return {vld1q_f32(p)};
  }
  static Vec load_bf16(const uint16_t* p) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))};
  }
  static Vec load_f16(const uint16_t* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))};
  }
  static Vec load_i8(const int8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)))};
  }
  static Vec load_u8(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)))};
  }
  void store(float* p) const {
    vst1q_f32(p, v);
  }
};

inline Vec operator+(Vec a, Vec b) {
  return {vaddq_f32(a.v, b.v)};
}
inline Vec operator-(Vec a, Vec b) {
  return {vsubq_f32(a.v, b.v)};
}
inline Vec operator*(Vec a, Vec b) {
  return {vmulq_f32(a.v, b.v)};
}
inline Vec operator/(Vec a, Vec b) {
  return {vdivq_f32(a.v, b.v)};
}
inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
  return {vfmaq_f32(c.v, a.v, b.v)};
}
inline Vec max(Vec a, Vec b) {  // b where either is NaN, as on x86
  return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)};
}
inline Vec min(Vec a, Vec b) {
  return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)};
}
inline Vec round(Vec a) {
  return {vrndnq_f32(a.v)};
}
inline Vec times_power_of_2(Vec a, Vec n) {  // n an integer from -126 to 127
  const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127));
  return {vmulq_f32(a.v, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)))};
}
inline float sum(Vec a) {
  return vaddvq_f32(a.v);
}
inline float largest(Vec a) {
  return vmaxvq_f32(a.v);
}

#else  // portable: four floats that any compiler may put into a register

struct Vec {
  static constexpr int width = 4;
  static constexpr int registers = 16;
  float v[4];

  template <class F>
  static Vec each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }
  static Vec of(float x) {
    return {{x, x, x, x}};
  }
  static Vec load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static Vec load_bf16(const uint16_t* p) {
    return each([&](int i) { return bf16_to_float(p[i]); });
  }
  static Vec load_f16(const uint16_t* p) {
    return each([&](int i) { return f16_to_float(p[i]); });
  }
  static Vec load_i8(const int8_t* p) {
    return each([&](int i) { return float(p[i]); });
  }
  static Vec load_u8(const uint8_t* p) {
    return each([&](int i) { return float(p[i]); });
  }
  void store(float* p) const {
    std::memcpy(p, v, sizeof(v));
  }
};

inline Vec operator+(Vec a, Vec b) {
  return Vec::each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vec operator-(Vec a, Vec b) {
  return Vec::each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vec operator*(Vec a, Vec b) {
  return Vec::each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vec operator/(Vec a, Vec b) {
  return Vec::each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
  return Vec::each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vec max(Vec a, Vec b) {  // b where either is NaN
  return Vec::each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec min(Vec a, Vec b) {
  return Vec::each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vec round(Vec a) {  // of numbers below 2^22 in size
  return Vec::each([&](int i) { return (a.v[i] + 0x1.8p23f) - 0x1.8p23f; });
}
inline Vec times_power_of_2(Vec a, Vec n) {  // n an integer from -126 to 127
  return Vec::each([&](int i) { return a.v[i] * bits_to_float(uint32_t(int(n.v[i]) + 127) << 23); });
}
inline float sum(Vec a) {
  return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
}
inline float largest(Vec a) {
  const Vec b = max(a, {{a.v[2], a.v[3], a.v[0], a.v[1]}});
  return b.v[0] > b.v[1] ? b.v[0] : b.v[1];
}

#endif

inline Vec zero() {
  return Vec::of(0.0f);
}

inline Vec load(const void* p, Float type, int64_t offset) {
  switch (type) {
    case Float::bf16:
      return Vec::load_bf16(static_cast<const uint16_t*>(p) + offset);
    case Float::f16:
      return Vec::load_f16(static_cast<const uint16_t*>(p) + offset);
    default:
      return Vec::load(static_cast<const float*>(p) + offset);
  }
}

// e^x to about 1 ulp; inputs are clamped to where the result is a normal number. NaN gives NaN.
inline Vec exp(Vec x) {
  // Bounds first: max and min answer with their second operand where x is NaN.
  x = max(Vec::of(-87.0f), min(Vec::of(88.0f), x));
  const Vec n = round(x * Vec::of(1.44269504f));
  Vec r = fma(n, Vec::of(-0.693145752f), x);  // ln 2 in two parts
  r = fma(n, Vec::of(-1.42860677e-6f), r);
  Vec p = Vec::of(1.98412698e-4f);
  p = fma(p, r, Vec::of(1.38888889e-3f));
  p = fma(p, r, Vec::of(8.33333333e-3f));
  p = fma(p, r, Vec::of(4.16666667e-2f));
  p = fma(p, r, Vec::of(1.66666667e-1f));
  p = fma(p, r, Vec::of(0.5f));
  p = fma(p, r, Vec::of(1.0f));
  p = fma(p, r, Vec::of(1.0f));
  return times_power_of_2(p, n);
}

inline Vec sigmoid(Vec x) {
  return Vec::of(1.0f) / (Vec::of(1.0f) + exp(zero() - x));
}

inline Vec silu(Vec x) {
  return x * sigmoid(x);
}

}  // namespace
}  // namespace qwen_metal
