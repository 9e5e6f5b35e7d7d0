// The three float types as the kernels see them. Includes no mlx and no standard containers, so that
// the per-instruction-set files may include it; everything has internal linkage, so that the linker never
// keeps a copy compiled for AVX-512 for everyone.
#pragma once

#include <cstdint>
#include <cstring>

namespace qwen_metal {

enum class Float : uint8_t { bf16, f16, f32 };

namespace {

inline int64_t size_of(Float type) {
  return type == Float::f32 ? 4 : 2;
}

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bf16_to_float(uint16_t bits) {
  return bits_to_float(uint32_t(bits) << 16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return uint16_t(bits >> 16) | 0x40;  // a NaN stays one
  }
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float f16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  }
  // 2^112 moves the exponent bias from 15 to 127, and normalises a subnormal.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) {
    return sign | 0x7e00;
  }
  if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    return sign | 0x7c00;
  }
  if (magnitude < 0x38800000) {  // subnormal: the adder rounds
    return sign | uint16_t(float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000);
  }
  return sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}

inline float load_float(const void* p, Float type, int64_t i) {
  switch (type) {
    case Float::bf16:
      return bf16_to_float(static_cast<const uint16_t*>(p)[i]);
    case Float::f16:
      return f16_to_float(static_cast<const uint16_t*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}

inline void store_float(void* p, Float type, int64_t i, float value) {
  switch (type) {
    case Float::bf16:
      static_cast<uint16_t*>(p)[i] = float_to_bf16(value);
      break;
    case Float::f16:
      static_cast<uint16_t*>(p)[i] = float_to_f16(value);
      break;
    default:
      static_cast<float*>(p)[i] = value;
  }
}

// n numbers at p + offset elements, as floats.
inline void load_floats(const void* p, Float type, int64_t offset, int64_t n, float* out) {
  if (type == Float::bf16) {
    const auto* in = static_cast<const uint16_t*>(p) + offset;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = bf16_to_float(in[i]);
    }
  } else if (type == Float::f16) {
    const auto* in = static_cast<const uint16_t*>(p) + offset;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = f16_to_float(in[i]);
    }
  } else {
    std::memcpy(out, static_cast<const float*>(p) + offset, n * sizeof(float));
  }
}

inline void store_floats(const float* in, int64_t n, void* p, Float type, int64_t offset) {
  if (type == Float::bf16) {
    auto* out = static_cast<uint16_t*>(p) + offset;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = float_to_bf16(in[i]);
    }
  } else if (type == Float::f16) {
    auto* out = static_cast<uint16_t*>(p) + offset;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = float_to_f16(in[i]);
    }
  } else {
    std::memcpy(static_cast<float*>(p) + offset, in, n * sizeof(float));
  }
}

}  // namespace
}  // namespace qwen_metal
