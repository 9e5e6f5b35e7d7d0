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

// Where a block takes many vectors, unrolling further only costs time to compile.
constexpr int kUnroll = kVecs > 2 ? 1 : 8;

constexpr int sums_index(int group) {
  return group == 32 ? 0 : group == 64 ? 1 : 2;
}

// R rows times N outputs from n on of an affine matrix, codes multiplied as they are: a group adds
// scale * sum(code x) + (bias + centre scale) * sum(x). Centred codes keep both terms as small as the
// result, so nothing cancels.
template <class Codes, int Group, int R, int N>
void multiply_codes(
    const MatrixView& m, const float* const* at, const float* const* sums, int64_t n, float* y, int64_t ldy) {
  constexpr int bytes = kBlock * Codes::bits / 8;
  constexpr int blocks = Group / kBlock;
  constexpr int batch = 32;  // scales converted at once
  const int64_t groups = m.columns / Group;
  // The hardware's own prefetch stops at a page, so ask for the same place of the next outputs.
  const int64_t ahead = N * m.weight_bytes < 2048 ? 2048 : N * m.weight_bytes;
  const char* p = m.weight + n * m.weight_bytes;
  Vec total[R][N];
  float rest[R][N];  // of the groups that fill no vector
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < N; ++i) {
      total[r][i] = zero();
      rest[r][i] = 0.0f;
    }
  }
  for (int64_t g0 = 0; g0 < groups; g0 += batch) {
    const int count = groups - g0 < batch ? groups - g0 : batch;
    alignas(64) float s[N][batch];
    for (int i = 0; i < N; ++i) {
      const char *scales = m.scales + (n + i) * m.scale_bytes, *biases = m.biases + (n + i) * m.bias_bytes;
      __builtin_prefetch(scales + N * m.scale_bytes);
      __builtin_prefetch(biases + N * m.bias_bytes);
      int g = 0;
      for (; g + Vec::width <= count; g += Vec::width) {
        const Vec scale = load(scales, m.type, g0 + g);
        scale.store(s[i] + g);
        const Vec b = fma(Vec::of(Codes::centre), scale, load(biases, m.type, g0 + g));
        for (int r = 0; r < R; ++r) {
          total[r][i] = fma(b, Vec::load(sums[r] + g0 + g), total[r][i]);
        }
      }
      for (; g < count; ++g) {
        s[i][g] = load_float(scales, m.type, g0 + g);
        const float b = load_float(biases, m.type, g0 + g) + Codes::centre * s[i][g];
        for (int r = 0; r < R; ++r) {
          rest[r][i] += b * sums[r][g0 + g];
        }
      }
    }
    for (int g = 0; g < count; ++g) {
      const int64_t k = (g0 + g) * Group;
      Vec part[R][N];
#pragma GCC unroll kUnroll
      for (int block = 0; block < blocks; ++block, p += bytes) {
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
          if (block * bytes % 64 == 0) {
            __builtin_prefetch(p + i * m.weight_bytes + ahead);
          }
          Vec codes[kVecs];
          Codes::unpack(p + i * m.weight_bytes, codes);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int j = 0; j < kVecs; ++j) {
              const Vec a = Vec::load(at[r] + k + block * kBlock + j * Vec::width);
              part[r][i] = block + j == 0 ? codes[j] * a : fma(codes[j], a, part[r][i]);
            }
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < N; ++i) {
          total[r][i] = fma(Vec::of(s[i][g]), part[r][i], total[r][i]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    float out[N];
    if constexpr (N == 4) {
      sums_of_4(total[r], out);
    } else {
      for (int i = 0; i < N; ++i) {
        out[i] = sum(total[r][i]);
      }
    }
    for (int i = 0; i < N; ++i) {
      const float bias = m.bias ? load_float(m.bias, m.bias_type, n + i) : 0.0f;
      y[r * ldy + i] = out[i] + rest[r][i] + bias;
    }
  }
}

template <class Codes, int Group, int R>
void multiply_codes(
    const MatrixView& m, const Rows& x, int64_t row, int64_t first, int64_t last, float* y, int64_t ldy) {
  // Outputs: as many as leave registers.
  constexpr int together = kVecs > 2 ? 1 : R == 1 ? 4 : R == 2 ? 2 : 1;
  const float *at[R], *sums[R];
  for (int r = 0; r < R; ++r) {
    const int64_t source = x.row(row + r);
    at[r] = (Codes::nibble_order ? x.nibbles : x.natural) + source * x.stride;
    sums[r] = x.sums[sums_index(Group)] + source * (m.columns / Group);
  }
  y += row * ldy;
  int64_t n = first;
  for (; n + together <= last; n += together) {
    multiply_codes<Codes, Group, R, together>(m, at, sums, n, y + n - first, ldy);
  }
  for (; n < last; ++n) {
    multiply_codes<Codes, Group, R, 1>(m, at, sums, n, y + n - first, ldy);
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

// R rows times 4 rows of an expanded panel: R x 4 accumulators, 4 + R loads for 4 R products. Both are
// zero from their last column to the next multiple of kBlock, where `columns` ends.
constexpr int64_t whole_blocks(int64_t columns) {
  return (columns + kBlock - 1) / kBlock * kBlock;
}

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
#pragma GCC unroll 2
  for (int64_t k = 0; k < columns; k += Vec::width) {
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
  // Few rows stay in the nearest cache with the four weight rows that meet them there; many rows share
  // a panel in the next one.
  const bool low = rows <= 4 * kTileRows;
  const int64_t height = low ? kTileOutputs : kPanelOutputs;
  const int64_t width = low ? kPanelColumns / 2 : kPanelColumns;
  for (int64_t from = 0; from < m.columns; from += width) {
    const int64_t to = from + width < m.columns ? from + width : m.columns;
    const int64_t columns = whole_blocks(to - from);
    const float* at[kPanelRows];
    for (int64_t i = 0; i < rows; ++i) {
      at[i] = source + x.row(row + i) * x.stride + from;
    }
    for (int64_t n0 = 0; n0 < padded; n0 += height) {
      const int64_t n1 = n0 + height < padded ? n0 + height : padded;
      for (int64_t n = n0; n < n1; ++n) {
        float* out = panel + (n - n0) * kPanelStride;
        if (n < outputs) {
          expand_row(m, first + n, from, to, true, out);
          std::memset(out + to - from, 0, (columns - (to - from)) * sizeof(float));
        } else {
          std::memset(out, 0, columns * sizeof(float));
        }
      }
      // Tiles of nearly equal height: a low one at the end would waste loads.
      const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t i = rows * tile / tiles;
        const int count = rows * (tile + 1) / tiles - i;
        for (int64_t n = n0; n < n1; n += kTileOutputs) {
          multiply_tile(
              count,
              at + i,
              panel + (n - n0) * kPanelStride,
              kPanelStride,
              columns,
              y + i * kPanelOutputs + n,
              kPanelOutputs);
        }
      }
    }
  }
}

// Every other format, few rows: four weight rows expanded at a time.
void few_expanded(
    const MatrixView& m, const Rows& x, int64_t first, int64_t last, float* y, int64_t ldy) {
  alignas(64) float panel[kTileOutputs * kPanelStride];
  alignas(64) float sums[kFewRows * kTileOutputs];
  for (int64_t n = first; n < last; n += kTileOutputs) {
    const int outputs = last - n < kTileOutputs ? last - n : kTileOutputs;
    std::memset(sums, 0, sizeof(sums));
    for (int64_t from = 0; from < m.columns; from += kPanelColumns) {
      const int64_t to = from + kPanelColumns < m.columns ? from + kPanelColumns : m.columns;
      const int64_t columns = whole_blocks(to - from);
      for (int i = 0; i < kTileOutputs; ++i) {
        // A row past the last is computed from the last one, and dropped.
        float* out = panel + i * kPanelStride;
        expand_row(m, n + (i < outputs ? i : outputs - 1), from, to, false, out);
        std::memset(out + to - from, 0, (columns - (to - from)) * sizeof(float));
      }
      for (int64_t row = 0; row < x.count; row += kTileRows) {
        const float* at[kTileRows];
        const int count = x.count - row < kTileRows ? x.count - row : kTileRows;
        for (int r = 0; r < count; ++r) {
          at[r] = x.natural + x.row(row + r) * x.stride + from;
        }
        multiply_tile(
            count, at, panel, kPanelStride, columns, sums + row * kTileOutputs, kTileOutputs);
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
  std::memset(out + columns, 0, (whole_blocks(columns) - columns) * sizeof(float));
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
