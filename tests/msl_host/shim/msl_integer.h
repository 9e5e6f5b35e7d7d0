// <metal_integer>, and the vector forms of min, max, abs and clamp.
#pragma once
namespace metal {

#define MSL_INTEGER_FUNCTIONS(T)                                                        \
  MSL_F inline constexpr T max(T a, T b) { return a > b ? a : b; }                      \
  MSL_F inline constexpr T min(T a, T b) { return a < b ? a : b; }                      \
  MSL_F inline constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  MSL_F inline constexpr T abs(T x) { return x < (T)0 ? (T)(0ul - (ulong)x) : x; }
MSL_INTEGER_FUNCTIONS(char)
MSL_INTEGER_FUNCTIONS(signed char)
MSL_INTEGER_FUNCTIONS(uchar)
MSL_INTEGER_FUNCTIONS(short)
MSL_INTEGER_FUNCTIONS(ushort)
MSL_INTEGER_FUNCTIONS(int)
MSL_INTEGER_FUNCTIONS(uint)
MSL_INTEGER_FUNCTIONS(long)
MSL_INTEGER_FUNCTIONS(ulong)
#undef MSL_INTEGER_FUNCTIONS

template <class T, int N>
MSL_F vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = max(a[i], b[i]);
  return r;
}
template <class T, int N>
MSL_F vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = min(a[i], b[i]);
  return r;
}
template <class T, int N>
MSL_F vec<T, N> abs(vec<T, N> a) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = abs(a[i]);
  return r;
}
template <class T, int N>
MSL_F vec<T, N> clamp(vec<T, N> a, vec<T, N> low, vec<T, N> high) {
  return min(max(a, low), high);
}

MSL_F inline uint popcount(uint x) { return (uint)__builtin_popcount(x); }
MSL_F inline int popcount(int x) { return __builtin_popcount((uint)x); }
MSL_F inline ulong popcount(ulong x) { return (ulong)__builtin_popcountl(x); }
MSL_F inline uint clz(uint x) { return x ? (uint)__builtin_clz(x) : 32u; }
MSL_F inline int clz(int x) { return x ? __builtin_clz((uint)x) : 32; }
MSL_F inline ulong clz(ulong x) { return x ? (ulong)__builtin_clzl(x) : 64ul; }
MSL_F inline uint ctz(uint x) { return x ? (uint)__builtin_ctz(x) : 32u; }
MSL_F inline int ctz(int x) { return x ? __builtin_ctz((uint)x) : 32; }
MSL_F inline ulong ctz(ulong x) { return x ? (ulong)__builtin_ctzl(x) : 64ul; }
MSL_F inline uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
MSL_F inline uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
MSL_F inline int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
MSL_F inline ulong mulhi(ulong a, ulong b) { return (ulong)(((unsigned __int128)a * b) >> 64); }
MSL_F inline ulong mul24(uint a, uint b) { return (a & 0xffffffu) * (b & 0xffffffu); }

template <class T>
MSL_F T rotate(T v, T by) {
  constexpr int bits = sizeof(T) * 8;
  uint shift = uint(by) & (bits - 1);
  return shift ? T((v << shift) | (v >> (bits - shift))) : v;
}
MSL_F inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0u : (x << (32 - offset - bits)) >> (32 - bits);
}
MSL_F inline int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : (int)((uint)x << (32 - offset - bits)) >> (32 - bits);
}

}  // namespace metal
