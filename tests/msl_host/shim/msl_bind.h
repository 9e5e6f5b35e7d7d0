// Arguments of the kernel, for the generated entry point.
#pragma once

// Type of parameter I of a function type.
template <int I, class F>
struct msl_parameter;
template <int I, class A, class... Rest>
struct msl_parameter<I, void(A, Rest...)> {
  using type = typename msl_parameter<I - 1, void(Rest...)>::type;
};
template <class A, class... Rest>
struct msl_parameter<0, void(A, Rest...)> {
  using type = A;
};

template <class T>
struct msl_argument;
template <class T>
struct msl_argument<T*> {
  static MSL_F T* buffer(uint index) { return (T*)msl_buffer(index); }
  static MSL_F T* group(uint index, const __constant char* name) {
    return (T*)msl_threadgroup_argument(index, name);
  }
};
template <class T>
struct msl_argument<T&> {
  static MSL_F T& buffer(uint index) { return *(T*)msl_buffer(index); }
};

template <class T>
struct msl_input {
  static MSL_F T get(uint which) { return (T)msl_attribute(which, 0); }
};
template <class T, int N>
struct msl_input<metal::vec<T, N>> {
  static MSL_F metal::vec<T, N> get(uint which) {
    metal::vec<T, N> value(T(0));
    for (int axis = 0; axis < N; axis++) value[axis] = (T)msl_attribute(which, axis);
    return value;
  }
};
