// What goes across the lanes of vectors, and rounded stores: beside simd.h, for the sequence kernels.
#pragma once

#include "cpu/simd.h"

namespace qwen_metal {
namespace {

#if defined(__AVX512F__)

// Lane i of the result is the sum of the lanes of a[i].
inline Vec sums_of(const Vec* a) {
  // t[i] holds the 256-bit halves' sums of a[i] and a[i + 4], t[i + 4] those of a[i + 8] and
  // a[i + 12]; then quarter q of t[i] belongs to a[i + 4 q].
  __m512 t[8];
  for (int i = 0; i < 8; ++i) {
    const Vec* pair = a + i + (i & 4);
    const __m512 low = _mm512_shuffle_f32x4(pair[0].v, pair[4].v, 0x44);
    const __m512 high = _mm512_shuffle_f32x4(pair[0].v, pair[4].v, 0xee);
    t[i] = _mm512_add_ps(low, high);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    t[i] = _mm512_add_ps(low, high);
  }
  const __m512 u0 = _mm512_add_ps(_mm512_unpacklo_ps(t[0], t[1]), _mm512_unpackhi_ps(t[0], t[1]));
  const __m512 u1 = _mm512_add_ps(_mm512_unpacklo_ps(t[2], t[3]), _mm512_unpackhi_ps(t[2], t[3]));
  return {_mm512_add_ps(_mm512_shuffle_ps(u0, u1, 0x44), _mm512_shuffle_ps(u0, u1, 0xee))};
}

// Swaps rows and columns of a square of width x width.
inline void transpose(Vec* a) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 within each quarter
    const __m512 p = _mm512_unpacklo_ps(a[i].v, a[i + 1].v);
    const __m512 q = _mm512_unpackhi_ps(a[i].v, a[i + 1].v);
    const __m512 r = _mm512_unpacklo_ps(a[i + 2].v, a[i + 3].v);
    const __m512 s = _mm512_unpackhi_ps(a[i + 2].v, a[i + 3].v);
    t[i] = _mm512_shuffle_ps(p, r, 0x44);
    t[i + 1] = _mm512_shuffle_ps(p, r, 0xee);
    t[i + 2] = _mm512_shuffle_ps(q, s, 0x44);
    t[i + 3] = _mm512_shuffle_ps(q, s, 0xee);
  }
  for (int i = 0; i < 4; ++i) {  // quarter q of t[i + 4 r] goes to quarter r of a[i + 4 q]
    const __m512 p = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
    const __m512 q = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const __m512 r = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
    const __m512 s = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    a[i].v = _mm512_shuffle_f32x4(p, r, 0x88);
    a[i + 4].v = _mm512_shuffle_f32x4(q, s, 0x88);
    a[i + 8].v = _mm512_shuffle_f32x4(p, r, 0xdd);
    a[i + 12].v = _mm512_shuffle_f32x4(q, s, 0xdd);
  }
}

// Rounded to nearest even; a NaN stays one.
inline void store_bf16(Vec x, uint16_t* p) {
  const __m512i bits = _mm512_castps_si512(x.v), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}

inline void store_f16(Vec x, uint16_t* p) {
  const __m256i halves = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
}

#else

#if defined(__AVX2__)

inline Vec sums_of(const Vec* a) {
  __m256 t[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 low = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x20);
    const __m256 high = _mm256_permute2f128_ps(a[i].v, a[i + 4].v, 0x31);
    t[i] = _mm256_add_ps(low, high);
  }
  return {_mm256_hadd_ps(_mm256_hadd_ps(t[0], t[1]), _mm256_hadd_ps(t[2], t[3]))};
}

inline void transpose(Vec* a) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 p = _mm256_unpacklo_ps(a[i].v, a[i + 1].v);
    const __m256 q = _mm256_unpackhi_ps(a[i].v, a[i + 1].v);
    const __m256 r = _mm256_unpacklo_ps(a[i + 2].v, a[i + 3].v);
    const __m256 s = _mm256_unpackhi_ps(a[i + 2].v, a[i + 3].v);
    t[i] = _mm256_shuffle_ps(p, r, 0x44);
    t[i + 1] = _mm256_shuffle_ps(p, r, 0xee);
    t[i + 2] = _mm256_shuffle_ps(q, s, 0x44);
    t[i + 3] = _mm256_shuffle_ps(q, s, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    a[i].v = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    a[i + 4].v = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

inline void store_bf16(Vec x, uint16_t* p) {
  const __m256i bits = _mm256_castps_si256(x.v), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline void store_f16(Vec x, uint16_t* p) {
  const __m128i halves = _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
}

#else  // NEON and portable: the compiler is left to find the instructions

inline Vec sums_of(const Vec* a) {
  float each[Vec::width];
  for (int i = 0; i < Vec::width; ++i) {
    each[i] = sum(a[i]);
  }
  return Vec::load(each);
}

inline void transpose(Vec* a) {
  float from[Vec::width][Vec::width], to[Vec::width][Vec::width];
  for (int i = 0; i < Vec::width; ++i) {
    a[i].store(from[i]);
  }
  for (int i = 0; i < Vec::width; ++i) {
    for (int j = 0; j < Vec::width; ++j) {
      to[j][i] = from[i][j];
    }
  }
  for (int i = 0; i < Vec::width; ++i) {
    a[i] = Vec::load(to[i]);
  }
}

inline void store_bf16(Vec x, uint16_t* p) {
  float each[Vec::width];
  x.store(each);
  store_floats(each, Vec::width, p, Float::bf16, 0);
}

inline void store_f16(Vec x, uint16_t* p) {
  float each[Vec::width];
  x.store(each);
  store_floats(each, Vec::width, p, Float::f16, 0);
}

#endif
#endif

// Codes of 4 bits, the low half of a byte first, from width / 2 bytes.
inline Vec load_u4(const uint8_t* p) {
#if defined(__AVX512F__) || defined(__AVX2__)
  int64_t few = 0;
  std::memcpy(&few, p, Vec::width / 2);
  const __m128i bytes = _mm_cvtsi64_si128(few), mask = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(bytes, mask);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  const __m128i codes = _mm_unpacklo_epi8(low, high);
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))};
#else
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes))};
#endif
#else
  uint8_t codes[Vec::width];
  for (int i = 0; i < Vec::width; ++i) {
    codes[i] = p[i / 2] >> (4 * (i % 2)) & 15;
  }
  return Vec::load_u8(codes);
#endif
}

}  // namespace
}  // namespace qwen_metal
