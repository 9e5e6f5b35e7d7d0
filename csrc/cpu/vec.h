// A vector of floats, one struct an instruction set, the same members in each.
//
// Kernels are templates over such a struct, so that one text serves every
// instruction set: only the files named *_avx512.cpp, *_avx2.cpp, *_neon.cpp
// and *_portable.cpp instantiate them, each compiled with its own flags.
// Everything here has internal linkage or hangs on the struct: a function
// shared between two object files could end up in the wider set's version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace qwen_metal::cpu {

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct Avx512 {
  static constexpr int lanes = 16;
  __m512 v;

  static Avx512 zero() { return {_mm512_setzero_ps()}; }
  static Avx512 all(float x) { return {_mm512_set1_ps(x)}; }
  static Avx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }

  static Avx512 load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Avx512 load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
  }
  /// 16 codes of one byte.
  static Avx512 load_u8(const uint8_t* p) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm512_cvtepi32_ps(wide)};
  }
  /// 16 codes of 4 bits, from 8 bytes, low half first.
  static Avx512 load_u4(const uint8_t* p) {
    __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))};
  }
  void store_bf16(uint16_t* p) const {
    // Round to nearest even; a nan keeps its top bits and stays quiet.
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  void store_f16(uint16_t* p) const {
    _mm256_storeu_si256(
        (__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Avx512 operator-(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Avx512 operator/(Avx512 a, Avx512 b) { return {_mm512_div_ps(a.v, b.v)}; }
  /// a * b + c, rounded once.
  static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Avx512 max(Avx512 a, Avx512 b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Avx512 min(Avx512 a, Avx512 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Avx512 round(Avx512 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
  /// a * 2^n for whole n between -126 and 127.
  static Avx512 scale(Avx512 a, Avx512 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
  float sum() const { return _mm512_reduce_add_ps(v); }
  float greatest() const { return _mm512_reduce_max_ps(v); }

  /// Lane i of the result is the sum of the lanes of a[i].
  static Avx512 sums(const Avx512* a) {
    // t[i] holds the 256-bit halves' sums of a[i] and a[i + 4], t[i + 4] those
    // of a[i + 8] and a[i + 12]; then quarter q of t[i] belongs to a[i + 4 q].
    __m512 t[8];
    for (int i = 0; i < 8; ++i) {
      const Avx512* pair = a + i + (i & 4);
      __m512 low = _mm512_shuffle_f32x4(pair[0].v, pair[4].v, 0x44);
      __m512 high = _mm512_shuffle_f32x4(pair[0].v, pair[4].v, 0xee);
      t[i] = _mm512_add_ps(low, high);
    }
    for (int i = 0; i < 4; ++i) {
      __m512 low = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
      __m512 high = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
      t[i] = _mm512_add_ps(low, high);
    }
    __m512 u0 = _mm512_add_ps(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
    __m512 u1 = _mm512_add_ps(_mm512_unpacklo_ps(t[2], t[3]), _mm512_unpackhi_ps(t[2], t[3]));
    __m512 low = _mm512_shuffle_ps(u0, u1, 0x44), high = _mm512_shuffle_ps(u0, u1, 0xee);
    return {_mm512_add_ps(low, high)};
  }
  /// Swaps rows and columns of a square of lanes x lanes.
  static void transpose(Avx512* a) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 4) {  // 4 x 4 within each quarter
      __m512 p = _mm512_unpacklo_ps(a[i].v, a[i + 1].v), q = _mm512_unpackhi_ps(a[i].v, a[i + 1].v);
      __m512 r = _mm512_unpacklo_ps(a[i + 2].v, a[i + 3].v);
      __m512 s = _mm512_unpackhi_ps(a[i + 2].v, a[i + 3].v);
      t[i] = _mm512_shuffle_ps(p, r, 0x44), t[i + 1] = _mm512_shuffle_ps(p, r, 0xee);
      t[i + 2] = _mm512_shuffle_ps(q, s, 0x44), t[i + 3] = _mm512_shuffle_ps(q, s, 0xee);
    }
    for (int i = 0; i < 4; ++i) {  // quarter q of t[i + 4 r] goes to quarter r of a[i + 4 q]
      __m512 p = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
      __m512 q = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
      __m512 r = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
      __m512 s = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
      a[i].v = _mm512_shuffle_f32x4(p, r, 0x88), a[i + 8].v = _mm512_shuffle_f32x4(p, r, 0xdd);
      a[i + 4].v = _mm512_shuffle_f32x4(q, s, 0x88), a[i + 12].v = _mm512_shuffle_f32x4(q, s, 0xdd);
    }
  }
};

#endif

#if defined(__AVX2__) && defined(__FMA__)

struct Avx2 {
  static constexpr int lanes = 8;
  __m256 v;

  static Avx2 zero() { return {_mm256_setzero_ps()}; }
  static Avx2 all(float x) { return {_mm256_set1_ps(x)}; }
  static Avx2 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }

  static Avx2 load_bf16(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Avx2 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))};
  }
  static Avx2 load_u8(const uint8_t* p) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    return {_mm256_cvtepi32_ps(wide)};
  }
  static Avx2 load_u4(const uint8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    __m128i bytes = _mm_cvtsi32_si128(four);
    __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)))};
  }
  void store_bf16(uint16_t* p) const {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
  }
  void store_f16(uint16_t* p) const {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Avx2 operator-(Avx2 a, Avx2 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Avx2 operator/(Avx2 a, Avx2 b) { return {_mm256_div_ps(a.v, b.v)}; }
  static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Avx2 max(Avx2 a, Avx2 b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Avx2 min(Avx2 a, Avx2 b) { return {_mm256_min_ps(a.v, b.v)}; }
  static Avx2 round(Avx2 a) { return {_mm256_round_ps(a.v, 8)}; }
  static Avx2 scale(Avx2 a, Avx2 n) {
    __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
    __m256i one = _mm256_set1_epi32(127 << 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_add_epi32(power, one)))};
  }
  float sum() const {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
  }
  float greatest() const {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
  }
  static Avx2 sums(const Avx2* a) {
    __m256 t[4];
    for (int i = 0; i < 4; ++i) {
      __m256 low = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x20);
      __m256 high = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x31);
      t[i] = _mm256_add_ps(low, high);
    }
    return {_mm256_hadd_ps(_mm256_hadd_ps(t[0], t[1]), _mm256_hadd_ps(t[2], t[3]))};
  }
  static void transpose(Avx2* a) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 4) {
      __m256 p = _mm256_unpacklo_ps(a[i].v, a[i + 1].v), q = _mm256_unpackhi_ps(a[i].v, a[i + 1].v);
      __m256 r = _mm256_unpacklo_ps(a[i + 2].v, a[i + 3].v);
      __m256 s = _mm256_unpackhi_ps(a[i + 2].v, a[i + 3].v);
      t[i] = _mm256_shuffle_ps(p, r, 0x44), t[i + 1] = _mm256_shuffle_ps(p, r, 0xee);
      t[i + 2] = _mm256_shuffle_ps(q, s, 0x44), t[i + 3] = _mm256_shuffle_ps(q, s, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      a[i].v = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
      a[i + 4].v = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
  }
};

#endif

#if defined(__ARM_NEON)

/// Two registers of 4, so that a tile has the same shape as with Avx2.
struct Neon {
  static constexpr int lanes = 8;
  float32x4_t a, b;

  static Neon zero() { return all(0.0f); }
  static Neon all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static Neon load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  void store(float* p) const { vst1q_f32(p, a), vst1q_f32(p + 4, b); }

  static Neon of(uint32x4_t low, uint32x4_t high) {
    return {vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)};
  }
  static Neon load_bf16(const uint16_t* p) {
    uint16x8_t x = vld1q_u16(p);
    return of(vshll_n_u16(vget_low_u16(x), 16), vshll_n_u16(vget_high_u16(x), 16));
  }
  static Neon load_f16(const uint16_t* p) {
    float16x8_t x = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))};
  }
  static Neon of_codes(uint8x8_t codes) {
    uint16x8_t wide = vmovl_u8(codes);
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
            vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
  }
  static Neon load_u8(const uint8_t* p) { return of_codes(vld1_u8(p)); }
  static Neon load_u4(const uint8_t* p) {
    uint32_t four;
    memcpy(&four, p, 4);
    uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return of_codes(vzip1_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)));
  }
  static uint16x4_t rounded_bf16(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
  }
  void store_bf16(uint16_t* p) const {
    vst1q_u16(p, vcombine_u16(rounded_bf16(a), rounded_bf16(b)));
  }
  void store_f16(uint16_t* p) const {
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(a), vcvt_f16_f32(b))));
  }

  friend Neon operator+(Neon x, Neon y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
  friend Neon operator-(Neon x, Neon y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
  friend Neon operator*(Neon x, Neon y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
  friend Neon operator/(Neon x, Neon y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
  static Neon fma(Neon x, Neon y, Neon z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)};
  }
  static Neon max(Neon x, Neon y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
  static Neon min(Neon x, Neon y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
  static Neon round(Neon x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
  static Neon scale(Neon x, Neon n) {
    auto power = [](float32x4_t k) {
      return vreinterpretq_f32_s32(
          vaddq_s32(vshlq_n_s32(vcvtq_s32_f32(k), 23), vdupq_n_s32(127 << 23)));
    };
    return {vmulq_f32(x.a, power(n.a)), vmulq_f32(x.b, power(n.b))};
  }
  float sum() const { return vaddvq_f32(vaddq_f32(a, b)); }
  float greatest() const { return vmaxvq_f32(vmaxq_f32(a, b)); }
  static Neon sums(const Neon* x) {
    float32x4_t t[8];
    for (int i = 0; i < 8; ++i) t[i] = vaddq_f32(x[i].a, x[i].b);
    return {vpaddq_f32(vpaddq_f32(t[0], t[1]), vpaddq_f32(t[2], t[3])),
            vpaddq_f32(vpaddq_f32(t[4], t[5]), vpaddq_f32(t[6], t[7]))};
  }
  static void transpose(Neon* x) {
    float from[8][8], to[8][8];
    for (int i = 0; i < 8; ++i) x[i].store(from[i]);
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 8; ++j) to[j][i] = from[i][j];
    for (int i = 0; i < 8; ++i) x[i] = load(to[i]);
  }
};

#endif

/// Plain C++, for machines without any of the above.
struct Portable {
  static constexpr int lanes = 8;
  float v[lanes];

  template <class F>
  static Portable each(F f) {
    Portable r;
    for (int i = 0; i < lanes; ++i) r.v[i] = f(i);
    return r;
  }
  static Portable zero() { return all(0.0f); }
  static Portable all(float x) { return each([&](int) { return x; }); }
  static Portable load(const float* p) { return each([&](int i) { return p[i]; }); }
  void store(float* p) const { memcpy(p, v, sizeof v); }

  static Portable load_bf16(const uint16_t* p) {
    return each([&](int i) {
      uint32_t bits = uint32_t(p[i]) << 16;
      float x;
      memcpy(&x, &bits, 4);
      return x;
    });
  }
  static Portable load_f16(const uint16_t* p) {
    return each([&](int i) {
      // Shift exponent and mantissa into place and multiply by 2^112: exact,
      // subnormals included; the top exponent means infinity or nan.
      uint32_t bits = uint32_t(p[i] & 0x7fff) << 13, sign = uint32_t(p[i] & 0x8000) << 16;
      float x;
      memcpy(&x, &bits, 4);
      x *= 0x1p112f;
      memcpy(&bits, &x, 4);
      if (x >= 65536.0f) bits |= 0x7f800000;
      bits |= sign;
      memcpy(&x, &bits, 4);
      return x;
    });
  }
  static Portable load_u8(const uint8_t* p) {
    return each([&](int i) { return float(p[i]); });
  }
  static Portable load_u4(const uint8_t* p) {
    return each([&](int i) { return float(p[i / 2] >> (4 * (i % 2)) & 15); });
  }
  void store_bf16(uint16_t* p) const {
    for (int i = 0; i < lanes; ++i) {
      uint32_t bits;
      memcpy(&bits, &v[i], 4);
      bool nan = (bits & 0x7fffffff) > 0x7f800000;
      p[i] = (nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
  }
  void store_f16(uint16_t* p) const {
    for (int i = 0; i < lanes; ++i) {
      uint32_t bits;
      memcpy(&bits, &v[i], 4);
      uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
      if (rest > 0x7f800000) {
        p[i] = sign | 0x7e00;
      } else if (rest >= 0x477ff000) {  // rounds to 65520 or more: infinity
        p[i] = sign | 0x7c00;
      } else if (rest < 0x38800000) {  // subnormal: adding 0.5 rounds at 2^-24
        float x;
        memcpy(&x, &rest, 4);
        x += 0.5f;
        memcpy(&rest, &x, 4);
        p[i] = sign | (rest - 0x3f000000);
      } else {
        rest += 0xfff + (rest >> 13 & 1);
        p[i] = sign | (rest - 0x38000000) >> 13;
      }
    }
  }

  friend Portable operator+(Portable a, Portable b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  friend Portable operator-(Portable a, Portable b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  friend Portable operator*(Portable a, Portable b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  friend Portable operator/(Portable a, Portable b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static Portable fma(Portable a, Portable b, Portable c) { return a * b + c; }
  static Portable max(Portable a, Portable b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Portable min(Portable a, Portable b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Portable round(Portable a) {
    return each([&](int i) { return __builtin_rintf(a.v[i]); });
  }
  static Portable scale(Portable a, Portable n) {
    return each([&](int i) {
      uint32_t bits = uint32_t(int(n.v[i]) + 127) << 23;
      float power;
      memcpy(&power, &bits, 4);
      return a.v[i] * power;
    });
  }
  float sum() const {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }
  float greatest() const {
    float most = v[0];
    for (int i = 1; i < lanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
  }
  static Portable sums(const Portable* a) {
    return each([&](int i) { return a[i].sum(); });
  }
  static void transpose(Portable* a) {
    for (int i = 0; i < lanes; ++i)
      for (int j = 0; j < i; ++j) {
        float kept = a[i].v[j];
        a[i].v[j] = a[j].v[i], a[j].v[i] = kept;
      }
  }
};

namespace {

/// e^x to about 1 ulp; 0 below -87.3, never infinite (88.7 and above saturate).
template <class V>
inline V exp(V x) {
  const V low = V::all(-87.33654f), high = V::all(88.37626f);
  // The order of the operands lets a nan through.
  x = V::min(high, V::max(low, x));
  V n = V::round(x * V::all(1.44269504f));
  // x - n ln 2 in two parts, so that the reduced argument is exact.
  V r = V::fma(n, V::all(-0.693359375f), x);
  r = V::fma(n, V::all(2.12194440e-4f), r);
  V p = V::all(1.9875691500e-4f);
  p = V::fma(p, r, V::all(1.3981999507e-3f));
  p = V::fma(p, r, V::all(8.3334519073e-3f));
  p = V::fma(p, r, V::all(4.1665795894e-2f));
  p = V::fma(p, r, V::all(1.6666665459e-1f));
  p = V::fma(p, r, V::all(5.0000001201e-1f));
  p = V::fma(p, r * r, r + V::all(1.0f));
  return V::scale(p, n);
}

template <class V>
inline V sigmoid(V x) {
  return V::all(1.0f) / (V::all(1.0f) + exp(V::zero() - x));
}

template <class V>
inline V silu(V x) {
  return x * sigmoid(x);
}

}  // namespace

}  // namespace qwen_metal::cpu
