// <metal_type_traits>, <metal_limits>, casts, and small general types.
#pragma once
namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr __constant T value = v;
  using value_type = T;
  using type = integral_constant;
  MSL_F constexpr operator T() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct remove_reference {
  using type = T;
};
template <class T>
struct remove_reference<T&> {
  using type = T;
};
template <class T>
struct remove_reference<T&&> {
  using type = T;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
struct remove_addrspace<__private T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__global T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__local T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__constant T> {
  using type = T;
};
template <class T>
struct remove_addrspace<__generic T> {
  using type = T;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T>
struct remove_const {
  using type = T;
};
template <class T>
struct remove_const<const T> {
  using type = T;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
struct remove_volatile {
  using type = T;
};
template <class T>
struct remove_volatile<volatile T> {
  using type = T;
};
template <class T>
struct remove_cv {
  using type = typename remove_volatile<typename remove_const<T>::type>::type;
};
template <class T>
struct remove_cv<__private T> : remove_cv<T> {};
template <class T>
struct remove_cv<__generic T> : remove_cv<T> {};
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
struct remove_pointer {
  using type = T;
};
template <class T>
struct remove_pointer<T*> {
  using type = T;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;

template <class T, class... Others>
struct msl_is_any : bool_constant<(is_same<T, Others>::value || ...)> {};
template <class T>
struct is_integral
    : msl_is_any<remove_cv_t<T>, bool, char, signed char, uchar, short, ushort, int, uint, long, ulong> {};
template <class T>
struct is_floating_point : msl_is_any<remove_cv_t<T>, float, half, bfloat> {};
template <class T>
struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <class T>
struct is_signed : bool_constant<is_floating_point<T>::value || (is_integral<T>::value && T(-1) < T(0))> {};
template <class T>
struct is_unsigned : bool_constant<is_integral<T>::value && !(T(-1) < T(0))> {};
template <class From, class To>
struct is_convertible : bool_constant<__is_convertible_to(From, To)> {};
template <class T>
struct is_pointer : false_type {};
template <class T>
struct is_pointer<T*> : true_type {};

template <class A, class B>
constexpr __constant bool is_same_v = is_same<A, B>::value;
template <class T>
constexpr __constant bool is_integral_v = is_integral<T>::value;
template <class T>
constexpr __constant bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
constexpr __constant bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T>
constexpr __constant bool is_signed_v = is_signed<T>::value;
template <class T>
constexpr __constant bool is_unsigned_v = is_unsigned<T>::value;
template <class From, class To>
constexpr __constant bool is_convertible_v = is_convertible<From, To>::value;

template <class... B>
struct disjunction : bool_constant<(B::value || ...)> {};
template <class... B>
struct conjunction : bool_constant<(B::value && ...)> {};
template <class... B>
using _disjunction = disjunction<B...>;
template <class... B>
using _conjunction = conjunction<B...>;

template <class T>
struct make_unsigned {
  using type = T;
};
template <>
struct make_unsigned<signed char> {
  using type = uchar;
};
template <>
struct make_unsigned<char> {
  using type = uchar;
};
template <>
struct make_unsigned<short> {
  using type = ushort;
};
template <>
struct make_unsigned<int> {
  using type = uint;
};
template <>
struct make_unsigned<long> {
  using type = ulong;
};
template <class T>
using make_unsigned_t = typename make_unsigned<T>::type;

template <class T>
struct make_scalar {
  using type = T;
};
template <class T, int N>
struct make_scalar<vec<T, N>> {
  using type = T;
};
template <class T>
using make_scalar_t = typename make_scalar<T>::type;

template <class T>
using uniform = T;
template <class T>
MSL_F constexpr T make_uniform(T x) {
  return x;
}

// ---- <metal_limits> ----

template <class T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, lowest_value, max_value, bits, is_signed_value)        \
  template <>                                                                        \
  struct numeric_limits<T> {                                                         \
    static MSL_F constexpr T min() { return (T)(lowest_value); }                     \
    static MSL_F constexpr T lowest() { return (T)(lowest_value); }                  \
    static MSL_F constexpr T max() { return (T)(max_value); }                        \
    static MSL_F constexpr T infinity() { return (T)0; }                             \
    static MSL_F constexpr T quiet_NaN() { return (T)0; }                            \
    static constexpr __constant int digits = bits;                                   \
    static constexpr __constant bool is_signed = is_signed_value;                    \
    static constexpr __constant bool is_integer = true;                              \
  };
MSL_INTEGER_LIMITS(bool, 0, 1, 1, false)
MSL_INTEGER_LIMITS(char, -128, 127, 7, true)
MSL_INTEGER_LIMITS(signed char, -128, 127, 7, true)
MSL_INTEGER_LIMITS(uchar, 0, 255, 8, false)
MSL_INTEGER_LIMITS(short, -32768, 32767, 15, true)
MSL_INTEGER_LIMITS(ushort, 0, 65535, 16, false)
MSL_INTEGER_LIMITS(int, (-2147483647 - 1), 2147483647, 31, true)
MSL_INTEGER_LIMITS(uint, 0, 0xffffffffu, 32, false)
MSL_INTEGER_LIMITS(long, (-0x7fffffffffffffffL - 1), 0x7fffffffffffffffL, 63, true)
MSL_INTEGER_LIMITS(ulong, 0, 0xffffffffffffffffUL, 64, false)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(T, Bits, max_bits, min_bits, epsilon_bits, infinity_bits, nan_bits, mantissa)  \
  template <>                                                                                           \
  struct numeric_limits<T> {                                                                            \
    static MSL_F constexpr T min() { return __builtin_bit_cast(T, Bits(min_bits)); }                    \
    static MSL_F constexpr T max() { return __builtin_bit_cast(T, Bits(max_bits)); }                    \
    static MSL_F constexpr T lowest() { return -__builtin_bit_cast(T, Bits(max_bits)); }                \
    static MSL_F constexpr T epsilon() { return __builtin_bit_cast(T, Bits(epsilon_bits)); }            \
    static MSL_F constexpr T infinity() { return __builtin_bit_cast(T, Bits(infinity_bits)); }          \
    static MSL_F constexpr T quiet_NaN() { return __builtin_bit_cast(T, Bits(nan_bits)); }              \
    static constexpr __constant int digits = mantissa;                                                  \
    static constexpr __constant bool is_signed = true;                                                  \
    static constexpr __constant bool is_integer = false;                                                \
  };
MSL_FLOAT_LIMITS(float, uint, 0x7f7fffffu, 0x00800000u, 0x34000000u, 0x7f800000u, 0x7fc00000u, 24)
MSL_FLOAT_LIMITS(half, ushort, 0x7bff, 0x0400, 0x1400, 0x7c00, 0x7e00, 11)
MSL_FLOAT_LIMITS(bfloat, ushort, 0x7f7f, 0x0080, 0x3c00, 0x7f80, 0x7fc0, 8)
#undef MSL_FLOAT_LIMITS

// ---- casts and selection ----

template <class T, class U>
MSL_F constexpr T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  return __builtin_bit_cast(T, x);
}
template <class T>
MSL_F constexpr T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, int N>
MSL_F vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <int N>
MSL_F bool any(vec<bool, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= v[i];
  return r;
}
template <int N>
MSL_F bool all(vec<bool, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= v[i];
  return r;
}

template <class T, size_t N>
struct array {
  T elements[N];
  MSL_F constexpr T& operator[](size_t i) { return elements[i]; }
  MSL_F constexpr const T& operator[](size_t i) const { return elements[i]; }
  MSL_F constexpr size_t size() const { return N; }
};

// Log messages are dropped.
struct os_log {
  template <class... A>
  MSL_F constexpr os_log(A...) __constant {}
  template <class... A>
  MSL_F void log_debug(A...) const __constant {}
};

}  // namespace metal

using metal::as_type;

// static_cast of the kernel: half and bfloat convert through float, which clang lacks.
template <class T, class U>
MSL_F constexpr T msl_cast(U x) {
  constexpr bool through_float = (metal::is_same<T, bfloat>::value && metal::is_same<U, half>::value) ||
      (metal::is_same<T, half>::value && metal::is_same<U, bfloat>::value);
  if constexpr (through_float) return (T)(float)x;
  else return static_cast<T>(x);
}
