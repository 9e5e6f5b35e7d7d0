/* Conversions of half and bfloat that clang calls and a bare link does not have. */
#include <stdint.h>
#include <string.h>

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* Round to nearest even; NaNs stay NaNs. */
static uint16_t bfloat_bits(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint32_t round_shift(uint32_t value, int shift) {
  uint32_t rounded = value >> shift, rest = value & ((1u << shift) - 1), half = 1u << (shift - 1);
  return rounded + (rest > half || (rest == half && (rounded & 1)));
}

static uint16_t half_bits(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x33000001) return (uint16_t)sign;
  if (magnitude >= 0x38800000) return (uint16_t)(sign | round_shift(magnitude - 0x38000000, 13));
  return (uint16_t)(sign | round_shift((magnitude & 0x7fffff) | 0x800000, 126 - (int)(magnitude >> 23)));
}

static float half_value(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  float magnitude = (float)mantissa * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

/* Round to odd: a second rounding to fewer bits is then correct. */
static float round_to_odd(double value) {
  float rounded = (float)value;
  if ((double)rounded == value || rounded != rounded) return rounded;
  uint32_t bits = bits_of(rounded);
  if (__builtin_fabs((double)rounded) > __builtin_fabs(value)) bits--;
  return float_of(bits | 1);
}

static __bf16 as_bfloat(uint16_t bits) {
  __bf16 value;
  memcpy(&value, &bits, 2);
  return value;
}

static _Float16 as_half(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}

__bf16 __truncsfbf2(float value) { return as_bfloat(bfloat_bits(value)); }
__bf16 __truncdfbf2(double value) { return as_bfloat(bfloat_bits(round_to_odd(value))); }
_Float16 __truncsfhf2(float value) { return as_half(half_bits(value)); }
_Float16 __truncdfhf2(double value) { return as_half(half_bits(round_to_odd(value))); }
float __extendhfsf2(_Float16 value) {
  uint16_t bits;
  memcpy(&bits, &value, 2);
  return half_value(bits);
}

/* The same through integers, for tests. */
uint16_t msl_test_bfloat(float value) { return bfloat_bits(value); }
uint16_t msl_test_half(float value) { return half_bits(value); }
uint16_t msl_test_half_from_double(double value) { return half_bits(round_to_odd(value)); }
float msl_test_half_value(uint16_t bits) { return half_value(bits); }
