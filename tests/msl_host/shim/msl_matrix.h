// <metal_simdgroup_matrix>: 8x8 matrices, two elements of one row in each lane.
#pragma once
namespace metal {

template <class T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "Metal has 8x8 SIMD-group matrices only");
  vec<T, 2> elements;
  MSL_F simdgroup_matrix() = default;
  MSL_F explicit simdgroup_matrix(T diagonal);
  MSL_F vec<T, 2>& thread_elements() { return elements; }
  MSL_F const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// Row, and first of the two columns, that the calling lane holds.
MSL_F inline int msl_matrix_row() {
  int lane = msl_own_lane();
  return (lane >> 4 & 1) << 2 | (lane >> 2 & 1) << 1 | (lane >> 1 & 1);
}
MSL_F inline int msl_matrix_column() {
  int lane = msl_own_lane();
  return (lane >> 3 & 1) << 2 | (lane & 1) << 1;
}

template <class T, int C, int R>
MSL_F simdgroup_matrix<T, C, R>::simdgroup_matrix(T diagonal) {
  int row = msl_matrix_row(), column = msl_matrix_column();
  elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
}
template <class T, int C, int R = 8>
MSL_F simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.elements = vec<T, 2>(value);
  return m;
}

MSL_F inline ulong msl_matrix_offset(int j, ulong stride, vec<ulong, 2> origin, bool transpose) {
  ulong row = msl_matrix_row(), column = msl_matrix_column() + j;
  return transpose ? (origin.y + column) * stride + origin.x + row : (origin.y + row) * stride + origin.x + column;
}

// The ballot makes loads and stores what they are: operations of the whole SIMD-group.
#define MSL_MATRIX_MEMORY(space)                                                                        \
  template <class T>                                                                                    \
  MSL_SIMD void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const space T* source, ulong stride = 8,   \
                               vec<ulong, 2> origin = vec<ulong, 2>(0ul), bool transpose = false) {     \
    msl_ballot(1);                                                                                      \
    for (int j = 0; j < 2; j++) d.elements[j] = source[msl_matrix_offset(j, stride, origin, transpose)]; \
  }                                                                                                     \
  template <class T>                                                                                    \
  MSL_SIMD void simdgroup_store(simdgroup_matrix<T, 8, 8> d, space T* target, ulong stride = 8,         \
                                vec<ulong, 2> origin = vec<ulong, 2>(0ul), bool transpose = false) {    \
    msl_ballot(1);                                                                                      \
    for (int j = 0; j < 2; j++) target[msl_matrix_offset(j, stride, origin, transpose)] = d.elements[j]; \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY

template <class D, class A, class B, class C>
MSL_SIMD void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                            simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  msl_matrix_shape shape = {8, 8, 8, 0, 0, 1, 0};
  float left[2], right[2], out[2];
  for (int j = 0; j < 2; j++) {
    left[j] = (float)a.elements[j];
    right[j] = (float)b.elements[j];
    out[j] = (float)c.elements[j];
  }
  msl_matrix_product(&shape, out, left, right);
  for (int j = 0; j < 2; j++) d.elements[j] = (D)out[j];
}
template <class D, class A, class B>
MSL_SIMD void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                 simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8>(D(0)));
}
template <class A, class B>
MSL_SIMD simdgroup_matrix<A, 8, 8> operator*(simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
  simdgroup_matrix<A, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
