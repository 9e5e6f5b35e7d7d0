// The kernels of QmmKernels, written once; a file qmm_<set>.cpp compiles them for an instruction set.
//
// Both products run along the columns: a vector of a weight row times a vector of an activation row,
// added up lane by lane, the lanes added at the end. So a weight row is used as it unpacks, with no
// transposition, and each partial sum is short, which keeps float32 as accurate as it can be.
#pragma once

#include <cmath>

#include "codes.h"

namespace qwen_metal {
namespace {

// (a, b, c, d) -> the four sums of their lanes.
inline void sums_of_4(const Vec* v, float out[4]) {
#if defined(__AVX512F__)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
  const __m512 all = _mm512_add_ps(
      _mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0].v, v[1].v), _mm256_hadd_ps(v[2].v, v[3].v));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#elif defined(__ARM_NEON)
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(v[0].v, v[1].v), vpaddq_f32(v[2].v, v[3].v)));
#else
  for (int i = 0; i < 4; ++i) {
    out[i] = sum(v[i]);
  }
#endif
}

constexpr int sums_index(int group) {
  return group == 32 ? 0 : group == 64 ? 1 : 2;
}

// R rows times the outputs [first, last) of an affine matrix, codes multiplied as they are: a group adds
// scale * sum(code x) + (bias + centre scale) * sum(x). Centred codes keep both terms as small as the
// result, so nothing cancels.
template <class Codes, int Group, int R>
void multiply_codes(
    const MatrixView& m,
    const Rows& x,
    int64_t row,
    int64_t first,
    int64_t last,
    float* y,
    int64_t ldy) {
  constexpr int bytes = kBlock * Codes::bits / 8;
  constexpr int blocks = Group / kBlock;
  constexpr int64_t ahead = 2048;  // bytes: the hardware's own prefetch stops at a page
  constexpr int batch = 32;        // scales converted at once
  const int64_t groups = m.columns / Group;
  const float *at[R], *sums[R];
  for (int r = 0; r < R; ++r) {
    const int64_t source = x.row(row + r);
    at[r] = (Codes::nibble_order ? x.nibbles : x.natural) + source * x.columns;
    sums[r] = x.sums[sums_index(Group)] + source * groups;
  }
  for (int64_t n = first; n < last; ++n) {
    const char* p = m.weight + n * m.weight_bytes;
    const char *scales = m.scales + n * m.scale_bytes, *biases = m.biases + n * m.bias_bytes;
    Vec total[R];
    float rest[R];  // of the groups that fill no vector
    for (int r = 0; r < R; ++r) {
      total[r] = zero();
      rest[r] = 0.0f;
    }
    for (int64_t g0 = 0; g0 < groups; g0 += batch) {
      const int count = groups - g0 < batch ? groups - g0 : batch;
      alignas(64) float s[batch];
      int i = 0;
      for (; i + Vec::width <= count; i += Vec::width) {
        const Vec scale = load(scales, m.type, g0 + i);
        scale.store(s + i);
        const Vec b = fma(Vec::of(Codes::centre), scale, load(biases, m.type, g0 + i));
        for (int r = 0; r < R; ++r) {
          total[r] = fma(b, Vec::load(sums[r] + g0 + i), total[r]);
        }
      }
      for (; i < count; ++i) {
        s[i] = load_float(scales, m.type, g0 + i);
        const float b = load_float(biases, m.type, g0 + i) + Codes::centre * s[i];
        for (int r = 0; r < R; ++r) {
          rest[r] += b * sums[r][g0 + i];
        }
      }
      for (i = 0; i < count; ++i) {
        const int64_t k = (g0 + i) * Group;
        Vec part[R];
#pragma GCC unroll 8
        for (int block = 0; block < blocks; ++block, p += bytes) {
          if (block * bytes % 64 == 0) {
            __builtin_prefetch(p + ahead);
          }
          Vec codes[kVecs];
          Codes::unpack(p, codes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int j = 0; j < kVecs; ++j) {
              const Vec a = Vec::load(at[r] + k + block * kBlock + j * Vec::width);
              part[r] = block + j == 0 ? codes[j] * a : fma(codes[j], a, part[r]);
            }
          }
        }
        for (int r = 0; r < R; ++r) {
          total[r] = fma(Vec::of(s[i]), part[r], total[r]);
        }
      }
    }
    const float bias = m.bias ? load_float(m.bias, m.bias_type, n) : 0.0f;
    for (int r = 0; r < R; ++r) {
      y[(row + r) * ldy + n - first] = sum(total[r]) + rest[r] + bias;
    }
  }
}

template <class Codes, int Group>
void multiply_codes(
    const MatrixView& m, const Rows& x, int64_t first, int64_t last, float* y, int64_t ldy) {
  // Blocks of outputs small enough that a second group of rows finds them in the nearest cache.
  const int64_t step = x.count > 4 ? 16 : last - first;
  for (int64_t n = first; n < last; n += step) {
    const int64_t end = n + step < last ? n + step : last;
    float* to = y + n - first;
    int64_t row = 0;
    for (; row + 4 <= x.count; row += 4) {
      multiply_codes<Codes, Group, 4>(m, x, row, n, end, to, ldy);
    }
    switch (x.count - row) {
      case 3:
        multiply_codes<Codes, Group, 3>(m, x, row, n, end, to, ldy);
        break;
      case 2:
        multiply_codes<Codes, Group, 2>(m, x, row, n, end, to, ldy);
        break;
      case 1:
        multiply_codes<Codes, Group, 1>(m, x, row, n, end, to, ldy);
        break;
    }
  }
}

template <class Codes>
void multiply_codes(
    const MatrixView& m, const Rows& x, int64_t first, int64_t last, float* y, int64_t ldy) {
  switch (m.group) {
    case 32:
      return multiply_codes<Codes, 32>(m, x, first, last, y, ldy);
    case 64:
      return multiply_codes<Codes, 64>(m, x, first, last, y, ldy);
    default:
      return multiply_codes<Codes, 128>(m, x, first, last, y, ldy);
  }
}

// R rows times 4 rows of an expanded panel: R x 4 accumulators, 4 + R loads for 4 R products.
constexpr int kTileOutputs = 4;
constexpr int kTileRows = Vec::registers == 32 ? 6 : 3;

template <int R>
void multiply_tile(
    const float* const* x, const float* w, int64_t ldw, int64_t columns, float* y, int64_t ldy) {
  Vec total[R][kTileOutputs];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kTileOutputs; ++n) {
      total[r][n] = zero();
    }
  }
  int64_t k = 0;
  for (; k + Vec::width <= columns; k += Vec::width) {
    Vec b[kTileOutputs];
#pragma GCC unroll 4
    for (int n = 0; n < kTileOutputs; ++n) {
      b[n] = Vec::load(w + n * ldw + k);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec a = Vec::load(x[r] + k);
#pragma GCC unroll 4
      for (int n = 0; n < kTileOutputs; ++n) {
        total[r][n] = fma(a, b[n], total[r][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float sums[kTileOutputs];
    sums_of_4(total[r], sums);
    for (int64_t i = k; i < columns; ++i) {
      for (int n = 0; n < kTileOutputs; ++n) {
        sums[n] += x[r][i] * w[n * ldw + i];
      }
    }
    for (int n = 0; n < kTileOutputs; ++n) {
      y[r * ldy + n] += sums[n];
    }
  }
}

template <int R = kTileRows>
void multiply_tile(
    int rows, const float* const* x, const float* w, int64_t ldw, int64_t columns, float* y, int64_t ldy) {
  if constexpr (R > 1) {
    if (rows < R) {
      return multiply_tile<R - 1>(rows, x, w, ldw, columns, y, ldy);
    }
  }
  multiply_tile<R>(x, w, ldw, columns, y, ldy);
}

void many(
    const MatrixView& m,
    const Rows& x,
    int64_t row,
    int64_t rows,
    int64_t first,
    int64_t last,
    float* y,
    float* panel) {
  const int64_t outputs = last - first;
  const int64_t padded = (outputs + kTileOutputs - 1) / kTileOutputs * kTileOutputs;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t n = 0; n < padded; ++n) {
      y[i * kPanelOutputs + n] =
          m.bias && n < outputs ? load_float(m.bias, m.bias_type, first + n) : 0.0f;
    }
  }
  const float* source = wants_nibbles(m) ? x.nibbles : x.natural;
  for (int64_t from = 0; from < m.columns; from += kPanelColumns) {
    const int64_t to = from + kPanelColumns < m.columns ? from + kPanelColumns : m.columns;
    // Rows of the panel a line further apart than a power of two, which would share cache sets.
    const int64_t columns = to - from;
    for (int64_t n = 0; n < padded; ++n) {
      float* out = panel + n * kPanelColumns;
      if (n < outputs) {
        expand_row(m, first + n, from, to, true, out);
      } else {
        std::memset(out, 0, columns * sizeof(float));
      }
    }
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const float* at[kTileRows];
      const int count = rows - i < kTileRows ? rows - i : kTileRows;
      for (int r = 0; r < count; ++r) {
        at[r] = source + x.row(row + i + r) * x.columns + from;
      }
      for (int64_t n = 0; n < padded; n += kTileOutputs) {
        multiply_tile(
            count, at, panel + n * kPanelColumns, kPanelColumns, columns, y + i * kPanelOutputs + n, kPanelOutputs);
      }
    }
  }
}

// Every other format, few rows: four weight rows expanded at a time.
void few_expanded(
    const MatrixView& m, const Rows& x, int64_t first, int64_t last, float* y, int64_t ldy) {
  alignas(64) float panel[kTileOutputs * kPanelColumns];
  alignas(64) float sums[kFewRows * kTileOutputs];
  for (int64_t n = first; n < last; n += kTileOutputs) {
    const int outputs = last - n < kTileOutputs ? last - n : kTileOutputs;
    std::memset(sums, 0, sizeof(sums));
    for (int64_t from = 0; from < m.columns; from += kPanelColumns) {
      const int64_t to = from + kPanelColumns < m.columns ? from + kPanelColumns : m.columns;
      for (int i = 0; i < kTileOutputs; ++i) {
        // A row past the last is computed from the last one, and dropped.
        expand_row(
            m, n + (i < outputs ? i : outputs - 1), from, to, false, panel + i * kPanelColumns);
      }
      for (int64_t row = 0; row < x.count; row += kTileRows) {
        const float* at[kTileRows];
        const int count = x.count - row < kTileRows ? x.count - row : kTileRows;
        for (int r = 0; r < count; ++r) {
          at[r] = x.natural + x.row(row + r) * x.columns + from;
        }
        multiply_tile(
            count, at, panel, kPanelColumns, to - from, sums + row * kTileOutputs, kTileOutputs);
      }
    }
    for (int64_t r = 0; r < x.count; ++r) {
      for (int i = 0; i < outputs; ++i) {
        const float bias = m.bias ? load_float(m.bias, m.bias_type, n + i) : 0.0f;
        y[r * ldy + n - first + i] = sums[r * kTileOutputs + i] + bias;
      }
    }
  }
}

void few(const MatrixView& m, const Rows& x, int64_t first, int64_t last, float* y, int64_t ldy) {
  if (!multiplies_codes(m)) {
    return few_expanded(m, x, first, last, y, ldy);
  }
  return m.bits == 4 ? multiply_codes<Nibbles>(m, x, first, last, y, ldy)
                     : multiply_codes<Bytes>(m, x, first, last, y, ldy);
}

void prepare(const char* in, Float type, const float* norm, float eps, int64_t columns, float* out) {
  load_floats(in, type, 0, columns, out);
  if (!norm) {
    return;
  }
  double squares = 0.0;  // a few thousand float additions would show in float32 outputs
  for (int64_t i = 0; i < columns; ++i) {
    squares += double(out[i]) * out[i];
  }
  const float scale = 1.0 / std::sqrt(squares / columns + eps);
  for (int64_t i = 0; i < columns; ++i) {
    out[i] = out[i] * scale * norm[i];
  }
}

void to_nibbles(const float* in, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k += kBlock) {
    for (int i = 0; i < 8; ++i) {
      out[k + 2 * i] = in[k + i];
      out[k + 2 * i + 1] = in[k + 8 + i];
    }
  }
}

void to_sums(const float* in, int64_t columns, int group, float* out) {
  for (int64_t k = 0; k < columns; k += group) {
    Vec total = zero();
    for (int i = 0; i < group; i += Vec::width) {
      total = total + Vec::load(in + k + i);
    }
    out[k / group] = sum(total);
  }
}

void swiglu(float* gate, const float* up, int64_t n) {
  int64_t i = 0;
  for (; i + Vec::width <= n; i += Vec::width) {
    (silu(Vec::load(gate + i)) * Vec::load(up + i)).store(gate + i);
  }
  if (i < n) {
    float g[Vec::width] = {}, u[Vec::width] = {};
    std::memcpy(g, gate + i, (n - i) * sizeof(float));
    std::memcpy(u, up + i, (n - i) * sizeof(float));
    (silu(Vec::load(g)) * Vec::load(u)).store(g);
    std::memcpy(gate + i, g, (n - i) * sizeof(float));
  }
}

void expand(const MatrixView& m, int64_t row, float* out) {
  expand_row(m, row, 0, m.columns, false, out);
}

void add(float* y, const char* x, Float type, float scale, int64_t n) {
  int64_t i = 0;
  for (; i + Vec::width <= n; i += Vec::width) {
    fma(Vec::of(scale), load(x, type, i), Vec::load(y + i)).store(y + i);
  }
  for (; i < n; ++i) {
    y[i] += scale * load_float(x, type, i);
  }
}

void store(const float* y, int64_t n, char* out, Float type) {
  store_floats(y, n, out, type, 0);
}

constexpr QmmKernels kernels = {
    few, many, prepare, to_nibbles, to_sums, swiglu, expand, add, store};

}  // namespace
}  // namespace qwen_metal
