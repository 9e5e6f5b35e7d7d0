// Codes of a matrix to floats: 16 columns at a time for 4 and 8 bit, a bit stream for every other width.
#pragma once

#include "qmm.h"
#include "simd.h"

namespace qwen_metal {
namespace {

constexpr int kBlock = 16;  // columns that one unpack() yields
constexpr int kVecs = kBlock / Vec::width;

inline uint64_t load_u64(const void* p) {
  uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

// 4-bit codes minus 8, in the order 0 8 1 9 ... 7 15: both words of a block stand in every lane pair,
// and one shift by a different amount a lane brings each code down.
struct Nibbles {
  static constexpr int bits = 4;
  static constexpr float centre = 8.0f;
  static constexpr bool nibble_order = true;

  static void unpack(const char* p, Vec out[kVecs]) {
#if defined(__AVX512F__)
    const __m512i words = _mm512_set1_epi64(load_u64(p));
    const __m512i shift =
        _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    // The table look-up reads the low four bits of a lane alone.
    const __m512 table =
        _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    out[0].v = _mm512_permutexvar_ps(_mm512_srlv_epi32(words, shift), table);
#elif defined(__AVX2__)
    const __m256i words = _mm256_set1_epi64x(load_u64(p));
    const __m256i shift = _mm256_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12), low = _mm256_set1_epi32(15);
    const __m256i a = _mm256_and_si256(_mm256_srlv_epi32(words, shift), low);
    const __m256i b = _mm256_and_si256(
        _mm256_srlv_epi32(words, _mm256_add_epi32(shift, _mm256_set1_epi32(16))), low);
    const __m256i eight = _mm256_set1_epi32(8);
    out[0].v = _mm256_cvtepi32_ps(_mm256_sub_epi32(a, eight));
    out[1].v = _mm256_cvtepi32_ps(_mm256_sub_epi32(b, eight));
#elif defined(__ARM_NEON)
    const uint32x4_t words = vreinterpretq_u32_u64(vdupq_n_u64(load_u64(p)));
    for (int i = 0; i < 4; ++i) {
      const int32x4_t shift = {-8 * i, -8 * i, -8 * i - 4, -8 * i - 4};
      const uint32x4_t code = vandq_u32(vshlq_u32(words, shift), vdupq_n_u32(15));
      out[i].v = vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(code), vdupq_n_s32(8)));
    }
#else
    const uint64_t words = load_u64(p);
    for (int i = 0; i < kBlock; ++i) {
      out[i / Vec::width].v[i % Vec::width] =
          float(int(words >> (i / 2 * 4 + i % 2 * 32) & 15) - 8);
    }
#endif
  }
};

// 8-bit codes minus 128, in the order of the columns.
struct Bytes {
  static constexpr int bits = 8;
  static constexpr float centre = 128.0f;
  static constexpr bool nibble_order = false;

  static void unpack(const char* p, Vec out[kVecs]) {
    // With its top bit flipped a code is the two's complement of itself minus 128.
#if defined(__AVX512F__)
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i flipped = _mm_xor_si128(codes, _mm_set1_epi8(-128));
    out[0].v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(flipped));
#else
    alignas(16) int8_t flipped[kBlock];
    const uint64_t top = 0x8080808080808080, a = load_u64(p) ^ top, b = load_u64(p + 8) ^ top;
    std::memcpy(flipped, &a, 8);
    std::memcpy(flipped + 8, &b, 8);
    for (int i = 0; i < kVecs; ++i) {
      out[i] = Vec::load_i8(flipped + i * Vec::width);
    }
#endif
  }
};

// fp4 (e2m1) and fp8 (e4m3) numbers.
inline float fp4_to_float(uint32_t code) {
  constexpr float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8 ? -values[code & 7] : values[code & 7];
}

inline float fp8_to_float(uint8_t code) {
  // Seven bits of exponent and fraction, moved to those of a float; 2^120 moves the exponent bias.
  const uint32_t magnitude = code & 0x7f, sign = uint32_t(code & 0x80) << 24;
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 20) * 0x1p120f));
}

inline float e8m0_to_float(uint8_t code) {
  return code ? bits_to_float(uint32_t(code) << 23) : 0x1p-127f;
}

// Columns [from, to) of `row`, in order, for any affine width: 8 codes are `Bits` bytes.
template <int Bits>
void expand_affine(const MatrixView& m, int64_t row, int64_t from, int64_t to, float* out) {
  const char* p = m.weight + row * m.weight_bytes + from * Bits / 8;
  const char *scales = m.scales + row * m.scale_bytes, *biases = m.biases + row * m.bias_bytes;
  for (int64_t k = from; k < to; k += m.group) {
    const float s = load_float(scales, m.type, k / m.group);
    const float b = load_float(biases, m.type, k / m.group);
    for (int i = 0; i < m.group; i += 8, p += Bits, out += 8) {
      uint64_t word = 0;
      std::memcpy(&word, p, Bits);
      for (int j = 0; j < 8; ++j) {
        out[j] = float(int32_t(word >> (Bits * j) & ((1 << Bits) - 1))) * s + b;
      }
    }
  }
}

// The same for a format with 16-column blocks, in the order in which they unpack.
template <class Codes>
void expand_blocks(const MatrixView& m, int64_t row, int64_t from, int64_t to, float* out) {
  constexpr int bytes = kBlock * Codes::bits / 8;
  constexpr int batch = 16;  // scales converted at once
  const char* p = m.weight + row * m.weight_bytes + from * Codes::bits / 8;
  const char *scales = m.scales + row * m.scale_bytes, *biases = m.biases + row * m.bias_bytes;
  const int64_t end = to / m.group, groups = m.columns / m.group;
  for (int64_t g0 = from / m.group; g0 < end; g0 += batch) {
    const int64_t g1 = end - g0 < batch ? end : g0 + batch;
    // A whole batch where the row has one, though it may begin before g0.
    const int64_t base = g0 + batch <= groups || groups < batch ? g0 : groups - batch;
    alignas(64) float s[batch], b[batch];
    if (groups >= batch) {
      for (int g = 0; g < batch; g += Vec::width) {
        const Vec scale = load(scales, m.type, base + g);
        scale.store(s + g);
        fma(Vec::of(Codes::centre), scale, load(biases, m.type, base + g)).store(b + g);
      }
    } else {
      for (int64_t g = 0; g < g1 - g0; ++g) {
        s[g] = load_float(scales, m.type, g0 + g);
        b[g] = load_float(biases, m.type, g0 + g) + Codes::centre * s[g];
      }
    }
    for (int64_t g = g0 - base; g < g1 - base; ++g) {
      const Vec scale = Vec::of(s[g]), offset = Vec::of(b[g]);
      for (int i = 0; i < m.group; i += kBlock, p += bytes) {
        Vec codes[kVecs];
        Codes::unpack(p, codes);
        for (int j = 0; j < kVecs; ++j, out += Vec::width) {
          fma(codes[j], scale, offset).store(out);
        }
      }
    }
  }
}

inline void expand_fp(const MatrixView& m, int64_t row, int64_t from, int64_t to, float* out) {
  const auto* p = reinterpret_cast<const uint8_t*>(m.weight + row * m.weight_bytes);
  const auto* scales = reinterpret_cast<const uint8_t*>(m.scales + row * m.scale_bytes);
  for (int64_t k = from; k < to; k += m.group, out += m.group) {
    const uint8_t code = scales[k / m.group];
    const float s =
        m.mode == Mode::nvfp4 ? fp8_to_float(code) * m.global_scale : e8m0_to_float(code);
    for (int i = 0; i < m.group; ++i) {
      const float value = m.mode == Mode::mxfp8
          ? fp8_to_float(p[k + i])
          : fp4_to_float(p[(k + i) / 2] >> ((k + i) % 2 * 4));
      out[i] = value * s;
    }
  }
}

// Columns [from, to) of `row` as floats; 4-bit affine ones in the order of nibbles where asked.
inline void expand_row(
    const MatrixView& m, int64_t row, int64_t from, int64_t to, bool nibbles, float* out) {
  switch (m.mode) {
    case Mode::dense:
      return load_floats(m.weight + row * m.weight_bytes, m.type, from, to - from, out);
    case Mode::affine:
      break;
    default:
      return expand_fp(m, row, from, to, out);
  }
  switch (m.bits) {
    case 2:
      return expand_affine<2>(m, row, from, to, out);
    case 3:
      return expand_affine<3>(m, row, from, to, out);
    case 4:
      return nibbles ? expand_blocks<Nibbles>(m, row, from, to, out)
                     : expand_affine<4>(m, row, from, to, out);
    case 5:
      return expand_affine<5>(m, row, from, to, out);
    case 6:
      return expand_affine<6>(m, row, from, to, out);
    default:
      return expand_blocks<Bytes>(m, row, from, to, out);
  }
}

}  // namespace
}  // namespace qwen_metal
