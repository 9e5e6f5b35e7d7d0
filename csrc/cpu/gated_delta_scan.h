// The gated delta rule over T tokens, and over one.
#pragma once

#include "cpu/convert.h"

namespace qwen_metal {

// One value head of a scan. Strides are floats from one token to the next.
struct ScanHead {
  const float *q, *k, *v, *g, *beta;
  size_t qk_stride, v_stride, gate_stride;
  // Whether each token counts, or null when all do.
  const bool* live;
  int tokens, Dk, Dv;
  // (Dv, Dk), read and written.
  float* state;
  // The tokens' outputs, `v_stride` apart.
  float* y;
};

namespace {

// Rows of the state that one pass keeps in the first-level cache.
constexpr int scan_rows = 2 * Vec::width;

// Floats of scratch `scan` needs.
constexpr int64_t scan_scratch(int tokens, int Dk) {
  return int64_t(Dk) * scan_rows + tokens;
}

// Two vectors of the state's rows at one column.
struct RowPair {
  Vec a, b;
};

// The state between tokens is kept as S = G s, the decays multiplied into the
// number G, so that a token costs three products an element instead of four.
// The update a token makes is added while the next one's products are formed.
//
// Adds pending * k_before to s, multiplies it by `fold` when Fold, and
// returns s . k and s . q.
template <bool Fold>
inline void scan_pass(
    float* s, int Dk, const float* k_before, RowPair pending, const float* k,
    const float* q, float fold, RowPair& with_k, RowPair& with_q) {
  // Two columns at a time: eight running sums hide the latency of the products.
  Vec sums[8];
  for (Vec& x : sums) x = zero();
  const Vec factor = Vec::of(fold);
  auto column = [&](int i, Vec* sum) __attribute__((always_inline)) {
    float* at = s + size_t(i) * scan_rows;
    Vec before = Vec::of(k_before[i]), kk = Vec::of(k[i]), qq = Vec::of(q[i]);
    Vec a = fma(pending.a, before, Vec::load(at));
    Vec b = fma(pending.b, before, Vec::load(at + Vec::width));
    if constexpr (Fold) a = a * factor, b = b * factor;
    a.store(at), b.store(at + Vec::width);
    sum[0] = fma(a, kk, sum[0]), sum[1] = fma(b, kk, sum[1]);
    sum[2] = fma(a, qq, sum[2]), sum[3] = fma(b, qq, sum[3]);
  };
  int i = 0;
  for (; i + 2 <= Dk; i += 2) column(i, sums), column(i + 1, sums + 4);
  if (i < Dk) column(i, sums);
  with_k = {sums[0] + sums[4], sums[1] + sums[5]};
  with_q = {sums[2] + sums[6], sums[3] + sums[7]};
}

// Copies rows [row, row + count) of the state to columns of s, or back.
template <bool Back>
inline void scan_turn(float* state, int Dk, int count, float* s, float factor) {
  constexpr int L = Vec::width;
  for (int half = 0; half < 2; ++half) {
    int rows = count - half * L < L ? count - half * L : L;
    if (rows <= 0) {
      if (!Back) {
        for (int i = 0; i < Dk; ++i) zero().store(s + size_t(i) * 2 * L + half * L);
      }
      continue;
    }
    for (int i = 0; i < Dk; i += L) {
      int columns = Dk - i < L ? Dk - i : L;
      Vec square[L];
      auto state_at = [&](int r) { return state + size_t(half * L + r) * Dk + i; };
      auto s_at = [&](int c) { return s + size_t(i + c) * 2 * L + half * L; };
      if constexpr (Back) {
        for (int c = 0; c < L; ++c) square[c] = c < columns ? Vec::load(s_at(c)) : zero();
        transpose(square);
        for (int r = 0; r < rows; ++r) {
          Vec x = square[r] * Vec::of(factor);
          columns == L ? x.store(state_at(r)) : store_some(x, state_at(r), columns);
        }
      } else {
        for (int r = 0; r < L; ++r) {
          square[r] = r >= rows      ? zero()
                      : columns == L ? Vec::load(state_at(r))
                                     : load_some(state_at(r), columns);
        }
        transpose(square);
        for (int c = 0; c < columns; ++c) square[c].store(s_at(c));
      }
    }
  }
}

// `count` floats at p (up to two vectors).
inline RowPair load_pair(const float* p, int count) {
  constexpr int L = Vec::width;
  if (count >= 2 * L) return {Vec::load(p), Vec::load(p + L)};
  if (count >= L) return {Vec::load(p), load_some(p + L, count - L)};
  return {load_some(p, count), zero()};
}

inline void store_pair(RowPair x, float* p, int count) {
  constexpr int L = Vec::width;
  if (count >= 2 * L) {
    x.a.store(p), x.b.store(p + L);
  } else if (count >= L) {
    x.a.store(p), store_some(x.b, p + L, count - L);
  } else {
    store_some(x.a, p, count);
  }
}

// All tokens of one value head.
inline void scan(const ScanHead& h, float* scratch) {
  // Outside these bounds G is multiplied into the state and starts again at 1.
  constexpr float least = 0x1p-40f, most = 0x1p40f;
  float* s = scratch;
  float* kq = scratch + size_t(h.Dk) * scan_rows;
  for (int t = 0; t < h.tokens; ++t) {
    kq[t] = dot(h.k + t * h.qk_stride, h.q + t * h.qk_stride, h.Dk);
  }
  for (int row = 0; row < h.Dv; row += scan_rows) {
    int count = h.Dv - row < scan_rows ? h.Dv - row : scan_rows;
    float* state = h.state + size_t(row) * h.Dk;
    scan_turn<false>(state, h.Dk, count, s, 1.0f);
    RowPair pending = {zero(), zero()}, with_k, with_q;
    const float* k_before = h.k;
    float G = 1.0f;
    for (int t = 0; t < h.tokens; ++t) {
      float* y = h.y + t * h.v_stride + row;
      if (h.live && !h.live[t]) {
        std::memset(y, 0, count * sizeof(float));
        continue;
      }
      const float *k = h.k + t * h.qk_stride, *q = h.q + t * h.qk_stride;
      G *= h.g[t * h.gate_stride];
      if (G > least && G < most) {
        scan_pass<false>(s, h.Dk, k_before, pending, k, q, 1.0f, with_k, with_q);
      } else {
        scan_pass<true>(s, h.Dk, k_before, pending, k, q, G, with_k, with_q);
        G = 1.0f;
      }
      const Vec g = Vec::of(G), beta = Vec::of(h.beta[t * h.gate_stride]);
      const Vec own = Vec::of(kq[t]), back = Vec::of(1.0f / G);
      RowPair v = load_pair(h.v + t * h.v_stride + row, count);
      Vec a = beta * (v.a - g * with_k.a), b = beta * (v.b - g * with_k.b);
      store_pair({fma(g, with_q.a, own * a), fma(g, with_q.b, own * b)}, y, count);
      pending = {a * back, b * back};
      k_before = k;
    }
    // A pass without products adds what the last token left; no token, no key to read.
    for (int i = 0; h.tokens > 0 && i < h.Dk; ++i) {
      float* at = s + size_t(i) * scan_rows;
      Vec before = Vec::of(k_before[i]);
      fma(pending.a, before, Vec::load(at)).store(at);
      fma(pending.b, before, Vec::load(at + Vec::width)).store(at + Vec::width);
    }
    scan_turn<true>(state, h.Dk, count, s, G);
  }
}

// One token of one value head; `state_out` may be `state_in`, and a null
// `state_in` stands for zeros. Bound by the state's traffic: each row is
// read once, and written while it is still in the first-level cache.
inline void scan_token(
    const float* q, const float* k, const float* v, float g, float beta,
    const float* state_in, float* state_out, int Dk, int Dv, float* y) {
  constexpr int L = Vec::width, R = L / 2;
  const float kq = dot(k, q, Dk);
  const int whole = Dk / L * L;
  for (int row = 0; row < Dv; row += R) {
    int count = Dv - row < R ? Dv - row : R;
    const float* from[R];
    for (int r = 0; r < R; ++r) {
      // Beyond the last row, the last row again: computed and not stored.
      from[r] = state_in ? state_in + size_t(row + (r < count ? r : count - 1)) * Dk : nullptr;
    }
    float sums[L] = {};
    if (state_in) {
      Vec sum[L];
      for (Vec& x : sum) x = zero();
      for (int i = 0; i < whole; i += L) {
        Vec kk = Vec::load(k + i), qq = Vec::load(q + i);
        for (int r = 0; r < R; ++r) {
          Vec x = Vec::load(from[r] + i);
          sum[r] = fma(x, kk, sum[r]);
          sum[R + r] = fma(x, qq, sum[R + r]);
        }
      }
      sums_of(sum).store(sums);
      for (int i = whole; i < Dk; ++i) {
        for (int r = 0; r < R; ++r) sums[r] += from[r][i] * k[i], sums[R + r] += from[r][i] * q[i];
      }
    }
    for (int r = 0; r < count; ++r) {
      float e = beta * (v[row + r] - g * sums[r]);
      y[row + r] = g * sums[R + r] + e * kq;
      float* to = state_out + size_t(row + r) * Dk;
      const Vec ee = Vec::of(e), gg = Vec::of(g);
      for (int i = 0; i < whole; i += L) {
        Vec x = ee * Vec::load(k + i);
        (state_in ? fma(gg, Vec::load(from[r] + i), x) : x).store(to + i);
      }
      for (int i = whole; i < Dk; ++i) to[i] = (state_in ? g * from[r][i] : 0.0f) + e * k[i];
    }
  }
}

}  // namespace
}  // namespace qwen_metal
