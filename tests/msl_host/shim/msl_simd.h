// Barriers, <metal_simdgroup> and <metal_quadgroup>.
#pragma once
namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
MSL_F inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }

MSL_SIMD inline void threadgroup_barrier(mem_flags flags) { msl_barrier(uint(flags), 0); }
MSL_SIMD inline void simdgroup_barrier(mem_flags flags) { msl_barrier(uint(flags), 1); }

// ---- moving values between lanes ----

// The value of lane `source`; the own one where source < 0.
template <class T>
MSL_SIMD T msl_from_lane(T value, int source) {
  T result;
  msl_shuffle(&result, &value, sizeof(T), source);
  return result;
}
MSL_F inline int msl_own_lane() { return (int)msl_lane(); }
MSL_F inline int msl_quad_lane(int lane) { return (msl_own_lane() & ~3) | (lane & 3); }
// Beyond the edge the specification leaves the value open; here the lane keeps its own.
MSL_F inline int msl_inside(int lane) { return lane >= 0 && lane < 32 ? lane : -1; }

template <class T>
MSL_SIMD T simd_shuffle(T value, ushort lane) {
  return msl_from_lane(value, (int)lane);
}
template <class T>
MSL_SIMD T simd_broadcast(T value, ushort lane) {
  return msl_from_lane(value, (int)lane);
}
template <class T>
MSL_SIMD T simd_shuffle_xor(T value, ushort mask) {
  return msl_from_lane(value, msl_own_lane() ^ (int)mask);
}
template <class T>
MSL_SIMD T simd_shuffle_up(T value, ushort delta) {
  return msl_from_lane(value, msl_inside(msl_own_lane() - (int)delta));
}
template <class T>
MSL_SIMD T simd_shuffle_down(T value, ushort delta) {
  return msl_from_lane(value, msl_inside(msl_own_lane() + (int)delta));
}
template <class T>
MSL_SIMD T simd_shuffle_rotate_up(T value, ushort delta) {
  return msl_from_lane(value, (msl_own_lane() - (int)delta) & 31);
}
template <class T>
MSL_SIMD T simd_shuffle_rotate_down(T value, ushort delta) {
  return msl_from_lane(value, (msl_own_lane() + (int)delta) & 31);
}
// Lanes form blocks of `modulo`; a lane reaching beyond its block takes the other side's filling value.
template <class T>
MSL_SIMD T msl_shuffle_and_fill(T value, T filling, int delta, int modulo) {
  struct Pair {
    T value, filling;
  } both = {value, filling};
  int base = msl_own_lane() / modulo * modulo, target = msl_own_lane() - base + delta;
  bool beyond = target < 0 || target >= modulo;
  Pair other = msl_from_lane(both, base + (target % modulo + modulo) % modulo);
  return beyond ? other.filling : other.value;
}
template <class T>
MSL_SIMD T simd_shuffle_and_fill_up(T value, T filling, ushort delta, ushort modulo = 32) {
  return msl_shuffle_and_fill(value, filling, -(int)delta, (int)modulo);
}
template <class T>
MSL_SIMD T simd_shuffle_and_fill_down(T value, T filling, ushort delta, ushort modulo = 32) {
  return msl_shuffle_and_fill(value, filling, (int)delta, (int)modulo);
}
template <class T>
MSL_SIMD T quad_shuffle(T value, ushort lane) {
  return msl_from_lane(value, msl_quad_lane(lane));
}
template <class T>
MSL_SIMD T quad_broadcast(T value, ushort lane) {
  return msl_from_lane(value, msl_quad_lane(lane));
}
template <class T>
MSL_SIMD T quad_shuffle_xor(T value, ushort mask) {
  return msl_from_lane(value, msl_quad_lane(msl_own_lane() ^ mask));
}

// ---- votes ----

struct simd_vote {
  typedef ulong vote_t;
  ulong mask;
  MSL_F explicit simd_vote(ulong m = 0) : mask(m) {}
  MSL_F explicit operator ulong() const { return mask; }
  MSL_F bool any() const { return mask != 0; }
  MSL_F bool all() const { return (uint)mask == 0xffffffffu; }
};
MSL_SIMD inline simd_vote simd_ballot(bool predicate) { return simd_vote((uint)msl_ballot(predicate)); }
MSL_SIMD inline simd_vote simd_active_threads_mask() { return simd_vote(msl_ballot(0) >> 32); }
MSL_SIMD inline bool simd_any(bool predicate) { return (uint)msl_ballot(predicate) != 0; }
MSL_SIMD inline bool simd_all(bool predicate) {
  ulong ballot = msl_ballot(predicate);
  return (uint)ballot == (uint)(ballot >> 32);
}
MSL_SIMD inline bool simd_is_first() { return __builtin_ctz((uint)(msl_ballot(0) >> 32)) == msl_own_lane(); }
MSL_F inline bool simd_is_helper_thread() { return false; }
template <class T>
MSL_SIMD T simd_broadcast_first(T value) {
  T values[32];
  return values[__builtin_ctz(msl_gather(values, &value, sizeof(T)))];
}

// ---- reductions: partners 1, 2, 4, 8, 16 lanes away; inactive lanes are left out ----

enum msl_reduction { msl_sum, msl_product, msl_max, msl_min, msl_and, msl_or, msl_xor };

template <msl_reduction Op, class T>
MSL_F T msl_combine(T a, T b) {
  if constexpr (Op == msl_sum) return T(a + b);
  else if constexpr (Op == msl_product) return T(a * b);
  else if constexpr (Op == msl_max) return a != a ? b : b != b ? a : a > b ? a : b;
  else if constexpr (Op == msl_min) return a != a ? b : b != b ? a : a < b ? a : b;
  else if constexpr (Op == msl_and) return T(a & b);
  else if constexpr (Op == msl_or) return T(a | b);
  else return T(a ^ b);
}
template <msl_reduction Op, int N, class T>
MSL_F vec<T, N> msl_combine(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; i++) a[i] = msl_combine<Op>(a[i], b[i]);
  return a;
}
template <class T>
constexpr __constant int msl_word_type = is_same<T, float>::value ? 0 : is_same<T, int>::value ? 1 : is_same<T, uint>::value ? 2 : -1;

template <msl_reduction Op, class T>
MSL_SIMD T msl_reduce_lanes(T value, int width) {
  if constexpr (msl_word_type<T> >= 0) {
    msl_reduce(&value, msl_word_type<T>, Op, (uint)width);
    return value;
  } else {
    T values[32];
    uint present = msl_gather(values, &value, sizeof(T));
    for (int step = 1; step < width; step *= 2)
      for (int lane = 0; lane < 32; lane += 2 * step) {
        if (!(present >> (lane + step) & 1)) continue;
        if (present >> lane & 1) values[lane] = msl_combine<Op>(values[lane], values[lane + step]);
        else values[lane] = values[lane + step];
        present |= 1u << lane;
      }
    return values[msl_own_lane() / width * width];
  }
}

#define MSL_REDUCTION(name, op)                                  \
  template <class T>                                             \
  MSL_SIMD T simd_##name(T value) {                              \
    return msl_reduce_lanes<op>(value, 32);                      \
  }                                                              \
  template <class T>                                             \
  MSL_SIMD T quad_##name(T value) {                              \
    return msl_reduce_lanes<op>(value, 4);                       \
  }
MSL_REDUCTION(sum, msl_sum)
MSL_REDUCTION(product, msl_product)
MSL_REDUCTION(max, msl_max)
MSL_REDUCTION(min, msl_min)
MSL_REDUCTION(and, msl_and)
MSL_REDUCTION(or, msl_or)
MSL_REDUCTION(xor, msl_xor)
#undef MSL_REDUCTION

// ---- prefix sums and products, in lane order ----

template <msl_reduction Op, class T>
MSL_SIMD T msl_prefix(T value, T identity, bool inclusive) {
  T values[32];
  uint present = msl_gather(values, &value, sizeof(T));
  T result = identity;
  int last = msl_own_lane() + (inclusive ? 1 : 0);
  for (int lane = 0; lane < last; lane++)
    if (present >> lane & 1) result = msl_combine<Op>(result, values[lane]);
  return result;
}
template <class T>
MSL_SIMD T simd_prefix_inclusive_sum(T value) {
  return msl_prefix<msl_sum>(value, T(0), true);
}
template <class T>
MSL_SIMD T simd_prefix_exclusive_sum(T value) {
  return msl_prefix<msl_sum>(value, T(0), false);
}
template <class T>
MSL_SIMD T simd_prefix_inclusive_product(T value) {
  return msl_prefix<msl_product>(value, T(1), true);
}
template <class T>
MSL_SIMD T simd_prefix_exclusive_product(T value) {
  return msl_prefix<msl_product>(value, T(1), false);
}

}  // namespace metal
