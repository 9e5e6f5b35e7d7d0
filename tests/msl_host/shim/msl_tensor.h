// Metal 4: metal::tensor, and the matmul2d of MetalPerformancePrimitives for one SIMD-group.
#pragma once
namespace metal {

struct execution_thread {};
struct execution_simdgroup {};
template <int N>
struct execution_simdgroups {};

constexpr __constant int dynamic_extent = -1;
struct tensor_inline {};
struct tensor_handle {};

template <class Index, int... Extents>
struct extents {
  static constexpr __constant int rank = sizeof...(Extents);
  Index sizes[rank];
  MSL_F extents() = default;
  template <class... I>
  MSL_F constexpr extents(I... values) : sizes{(Index)values...} {}
  MSL_F Index extent(int axis) const { return sizes[axis]; }
};
template <class Index, int Rank>
struct msl_dynamic_extents;
template <class Index>
struct msl_dynamic_extents<Index, 1> {
  using type = extents<Index, dynamic_extent>;
};
template <class Index>
struct msl_dynamic_extents<Index, 2> {
  using type = extents<Index, dynamic_extent, dynamic_extent>;
};
template <class Index, int Rank>
using dextents = typename msl_dynamic_extents<Index, Rank>::type;

// A rank-2 view of memory; axis 0 is the fast one (columns), axis 1 the rows.
template <class Element, class Extents, class Kind = tensor_inline>
struct tensor {
  using element_type = Element;
  using value_type = remove_addrspace_t<Element>;
  Element* data;
  int width, height;
  int stride0, stride1;

  MSL_F tensor(Element* pointer, Extents size, array<int, 2> strides)
      : data(pointer), width(size.sizes[0]), height(size.sizes[1]), stride0(strides[0]), stride1(strides[1]) {}
  MSL_F tensor(Element* pointer, Extents size)
      : data(pointer), width(size.sizes[0]), height(size.sizes[1]), stride0(1), stride1(size.sizes[0]) {}

  MSL_F int get_extent(int axis) const { return axis == 0 ? width : height; }
  MSL_F bool contains(int column, int row) const { return column < width && row < height; }
  MSL_F Element& at(int column, int row) const { return data[(long)row * stride1 + (long)column * stride0]; }

  // A part that starts at (column, row). A static size is taken as it is; a dynamic one ends with the tensor.
  template <int Width, int Height>
  MSL_F tensor slice(int column, int row) const {
    tensor part = *this;
    part.data = data + (long)row * stride1 + (long)column * stride0;
    part.width = Width == dynamic_extent ? width - column : Width;
    part.height = Height == dynamic_extent ? height - row : Height;
    return part;
  }
  MSL_F tensor slice(int column, int row) const { return slice<dynamic_extent, dynamic_extent>(column, row); }
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
};

// rewrite.py turns a descriptor value into this type: C++17 has no class template arguments.
template <int M, int N, int K, bool TransposeLeft = false, bool TransposeRight = false, bool Relaxed = false,
          matmul2d_descriptor::mode Mode = matmul2d_descriptor::mode::multiply>
struct msl_descriptor {
  enum : int { rows = M, columns = N, depth = K };
  enum : bool {
    transpose_left = TransposeLeft,
    transpose_right = TransposeRight,
    accumulate = Mode == matmul2d_descriptor::mode::multiply_accumulate,
  };
};

// Element type of an operand: of a tensor, of a cooperative tensor, or the type itself.
template <class T>
struct msl_element {
  using type = T;
};
template <class T>
struct msl_element<__private T> : msl_element<T> {};
template <class T>
struct msl_element<__generic T> : msl_element<T> {};
template <class E, class X, class K>
struct msl_element<metal::tensor<E, X, K>> {
  using type = typename metal::tensor<E, X, K>::value_type;
};

// A Rows x Columns matrix over one SIMD-group: 16x16 fragments, in each a lane holds four
// neighbouring elements of a row and of the row eight further down. MLX assumes this layout.
template <class T, int Rows, int Columns>
struct msl_cooperative_tensor {
  using element_type = T;
  enum : int { capacity = Rows * Columns / 32 };
  T elements[capacity];

  MSL_F T& operator[](int i) { return elements[i]; }
  MSL_F T operator[](int i) const { return elements[i]; }
  static MSL_F constexpr ushort get_capacity() { return capacity; }
  static MSL_F constexpr bool is_valid_element(int) { return true; }

  static MSL_F int row_of(int i) {
    int quad = metal::msl_own_lane() >> 2, fragment = i >> 3;
    return 16 * (fragment / (Columns / 16)) + ((quad & 4) | (metal::msl_own_lane() >> 1 & 3)) + 8 * ((i & 7) >> 2);
  }
  static MSL_F int column_of(int i) {
    int quad = metal::msl_own_lane() >> 2, fragment = i >> 3;
    return 16 * (fragment % (Columns / 16)) + ((quad & 2) | (metal::msl_own_lane() & 1)) * 4 + (i & 3);
  }
  MSL_F metal::array<ushort, 2> get_multidimensional_index(int i) const {
    return {{(ushort)column_of(i), (ushort)row_of(i)}};
  }

  // Elements beyond the edge of the tensor are zero.
  template <class E, class X, class K>
  MSL_SIMD void load(const metal::tensor<E, X, K>& from) {
    msl_ballot(1);
    for (int i = 0; i < capacity; i++)
      elements[i] = from.contains(column_of(i), row_of(i)) ? (T)from.at(column_of(i), row_of(i)) : (T)0;
  }
  // Elements beyond the edge of the tensor are not stored.
  template <class E, class X, class K>
  MSL_SIMD void store(const metal::tensor<E, X, K>& to) const {
    msl_ballot(1);
    for (int i = 0; i < capacity; i++)
      if (to.contains(column_of(i), row_of(i))) to.at(column_of(i), row_of(i)) = elements[i];
  }
};

template <class T>
struct msl_is_tensor : metal::false_type {};
template <class E, class X, class K>
struct msl_is_tensor<metal::tensor<E, X, K>> : metal::true_type {};

template <class D, class Scope>
struct matmul2d {
  static_assert(metal::is_same<Scope, metal::execution_simdgroup>::value,
                "the host executor runs matmul2d over one SIMD-group only");
  template <class T>
  using Left = msl_cooperative_tensor<T, D::transpose_left ? D::depth : D::rows, D::transpose_left ? D::rows : D::depth>;
  template <class T>
  using Right =
      msl_cooperative_tensor<T, D::transpose_right ? D::columns : D::depth, D::transpose_right ? D::depth : D::columns>;
  template <class T>
  using Destination = msl_cooperative_tensor<T, D::rows, D::columns>;

  template <class A, class B, class C>
  MSL_F Left<typename msl_element<A>::type> get_left_input_cooperative_tensor() const {
    return {};
  }
  template <class A, class B, class C>
  MSL_F Right<typename msl_element<B>::type> get_right_input_cooperative_tensor() const {
    return {};
  }
  template <class A, class B, class C>
  MSL_F Destination<C> get_destination_cooperative_tensor() const {
    return {};
  }

  // Operands are cooperative tensors, or tensors that are read with edge masking.
  template <class A, class B, class C>
  MSL_SIMD void run(const A& left, const B& right, C& out) const {
    float a[D::rows * D::depth / 32], b[D::depth * D::columns / 32], c[C::capacity];
    to_floats<Left<typename msl_element<A>::type>>(left, a);
    to_floats<Right<typename msl_element<B>::type>>(right, b);
    for (int i = 0; i < C::capacity; i++) c[i] = D::accumulate ? (float)out[i] : 0.0f;
    msl_matrix_shape shape = {D::rows, D::columns, D::depth, D::transpose_left, D::transpose_right, D::accumulate, 1};
    msl_matrix_product(&shape, c, a, b);
    for (int i = 0; i < C::capacity; i++) out[i] = (typename C::element_type)c[i];
  }

 private:
  template <class Registers, class A>
  static MSL_SIMD void to_floats(const A& operand, float* values) {
    if constexpr (msl_is_tensor<metal::remove_addrspace_t<A>>::value) {
      Registers registers;
      registers.load(operand);
      for (int i = 0; i < Registers::capacity; i++) values[i] = (float)registers[i];
    } else {
      for (int i = 0; i < A::capacity; i++) values[i] = (float)operand[i];
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp
