/* SIMD operations: each runs once, on all lanes that wait at one place. */
#include "runtime.h"

#include <string.h>

static void copy_value(void *to, const void *from, uint32_t size) {
  memcpy(to, from, size);
  if (launch.checked) memcpy(find_shadow((uintptr_t)to, size), find_shadow((uintptr_t)from, size), size);
}

static void mark_initialised(void *memory, uint32_t size) {
  if (launch.checked) memset(find_shadow((uintptr_t)memory, size), 0, size);
}

static bool is_initialised(const void *memory, uint32_t size) {
  const uint8_t *shadow = find_shadow((uintptr_t)memory, size);
  for (uint32_t i = 0; i < size; i++)
    if (shadow[i]) return false;
  return true;
}

typedef struct {
  void *out;
  const void *in;
  uint32_t size;
  int32_t source; /* lane to read, or -1 - lane: keep the own value */
} Shuffle;

static void do_shuffle(Fiber **lanes, uint32_t active) {
  FOR_ACTIVE(lane, active) {
    Shuffle *own = lanes[lane]->arguments;
    uint32_t source = own->source < 0 ? lane : (uint32_t)own->source;
    if (source < SIMD_WIDTH && active >> source & 1) {
      copy_value(own->out, ((Shuffle *)lanes[source]->arguments)->in, own->size);
      continue;
    }
    current = lanes[lane];
    add_finding("simd-inactive-lane", current->pc, "reads lane %u, which is not active here", source);
    memset(own->out, 0xff, own->size);
  }
}

/* *out = *in of lane `source`; source < 0 keeps the own value. */
void msl_shuffle(void *out, const void *in, uint32_t size, int32_t source) {
  Shuffle arguments = {out, in, size, source};
  mark_initialised(out, size);
  simd_operation(do_shuffle, &arguments, CALLER);
}

typedef struct {
  void *out;
  const void *in;
  uint32_t size, active;
} Gather;

static void do_gather(Fiber **lanes, uint32_t active) {
  FOR_ACTIVE(lane, active) {
    Gather *own = lanes[lane]->arguments;
    own->active = active;
    mark_initialised(own->out, own->size * SIMD_WIDTH);
    FOR_ACTIVE(other, active)
    copy_value((char *)own->out + other * own->size, ((Gather *)lanes[other]->arguments)->in, own->size);
  }
}

/* out[lane] = *in of each active lane; returns the mask of active lanes. */
uint32_t msl_gather(void *out, const void *in, uint32_t size) {
  Gather arguments = {out, in, size, 0};
  simd_operation(do_gather, &arguments, CALLER);
  return arguments.active;
}

enum ReduceType { REDUCE_FLOAT, REDUCE_INT, REDUCE_UINT };
enum ReduceOp { REDUCE_SUM, REDUCE_PRODUCT, REDUCE_MAX, REDUCE_MIN, REDUCE_AND, REDUCE_OR, REDUCE_XOR };
typedef union {
  float f;
  int32_t i;
  uint32_t u;
} Word;
typedef struct {
  Word value;
  uint32_t type, op, width, undefined;
} Reduce;

static float reduce_float(float a, float b, enum ReduceOp op) {
  switch (op) {
    case REDUCE_SUM: return a + b;
    case REDUCE_PRODUCT: return a * b;
    case REDUCE_MAX: return a != a ? b : b != b ? a : a > b ? a : b;
    default: return a != a ? b : b != b ? a : a < b ? a : b;
  }
}

static Word reduce_pair(Word a, Word b, const Reduce *how) {
  bool is_signed = how->type == REDUCE_INT;
  if (how->type == REDUCE_FLOAT) return (Word){.f = reduce_float(a.f, b.f, how->op)};
  switch ((enum ReduceOp)how->op) {
    case REDUCE_SUM: return (Word){.u = a.u + b.u};
    case REDUCE_PRODUCT: return (Word){.u = a.u * b.u};
    case REDUCE_MAX: return (is_signed ? a.i > b.i : a.u > b.u) ? a : b;
    case REDUCE_MIN: return (is_signed ? a.i < b.i : a.u < b.u) ? a : b;
    case REDUCE_AND: return (Word){.u = a.u & b.u};
    case REDUCE_OR: return (Word){.u = a.u | b.u};
    case REDUCE_XOR: return (Word){.u = a.u ^ b.u};
  }
  return a;
}

/* Butterfly order: partners 1, 2, 4, 8, 16 lanes away; inactive lanes are left out. */
static void do_reduce(Fiber **lanes, uint32_t active) {
  const Reduce *how = NULL;
  Word value[SIMD_WIDTH];
  uint32_t undefined[SIMD_WIDTH] = {0};
  uint32_t present = active;
  FOR_ACTIVE(lane, active) {
    how = lanes[lane]->arguments;
    value[lane] = how->value;
    undefined[lane] = how->undefined;
  }
  for (uint32_t step = 1; step < how->width; step *= 2)
    for (uint32_t lane = 0; lane < SIMD_WIDTH; lane += 2 * step) {
      uint32_t other = lane + step;
      if (!(present >> other & 1)) continue;
      value[lane] = present >> lane & 1 ? reduce_pair(value[lane], value[other], how) : value[other];
      undefined[lane] |= undefined[other];
      present |= 1u << lane;
    }
  FOR_ACTIVE(lane, active) {
    Reduce *own = lanes[lane]->arguments;
    own->value = value[lane / own->width * own->width];
    own->undefined = undefined[lane / own->width * own->width];
  }
}

/* Reduce the 4-byte *value over lanes of each block of `width`; every lane gets the result. */
void msl_reduce(void *value, uint32_t type, uint32_t op, uint32_t width) {
  Reduce arguments = {.type = type, .op = op, .width = width};
  memcpy(&arguments.value, value, 4);
  if (launch.checked) arguments.undefined = !is_initialised(value, 4);
  simd_operation(do_reduce, &arguments, CALLER);
  memcpy(value, &arguments.value, 4);
  if (launch.checked) memset(find_shadow((uintptr_t)value, 4), arguments.undefined ? 0xff : 0, 4);
}

typedef struct {
  uint32_t predicate, ballot, active;
} Ballot;

static void do_ballot(Fiber **lanes, uint32_t active) {
  uint32_t ballot = 0;
  FOR_ACTIVE(lane, active) if (((Ballot *)lanes[lane]->arguments)->predicate) ballot |= 1u << lane;
  FOR_ACTIVE(lane, active) {
    ((Ballot *)lanes[lane]->arguments)->ballot = ballot;
    ((Ballot *)lanes[lane]->arguments)->active = active;
  }
}

/* Low half: lanes whose predicate holds; high half: active lanes. */
uint64_t msl_ballot(uint32_t predicate) {
  Ballot arguments = {predicate, 0, 0};
  simd_operation(do_ballot, &arguments, CALLER);
  return (uint64_t)arguments.active << 32 | arguments.ballot;
}

/* Shape of a cooperative matrix product; the shim uses the same layout. */
typedef struct {
  int32_t rows, columns, depth;
  int32_t transpose_left, transpose_right, accumulate;
  int32_t layout; /* 0: 8x8 SIMD-group matrix, 1: 16x16 fragments of cooperative tensors */
} MatrixShape;
typedef struct {
  const MatrixShape *shape;
  const float *left, *right;
  float *out;
} MatrixProduct;

/* Lane and element that hold (row, column) of a matrix with `columns` columns. */
static void locate(int layout, int columns, int row, int column, int *lane, int *element) {
  if (layout == 0) {
    *lane = (column >> 1 & 1) | (row & 1) << 1 | (row >> 1 & 1) << 2 | (column >> 2 & 1) << 3 | (row >> 2 & 1) << 4;
    *element = column & 1;
    return;
  }
  int quad = (column & 15) >> 2;
  *lane = (quad & 1) | (row & 3) << 1 | (quad >> 1) << 3 | (row >> 2 & 1) << 4;
  *element = ((row >> 4) * (columns >> 4) + (column >> 4)) * 8 + (row >> 3 & 1) * 4 + (column & 3);
}

/* Copy one operand out of the lanes, row-major with `columns` columns. */
static bool collect(Fiber **lanes, int layout, int rows, int columns, int operand, float *matrix) {
  bool initialised = true;
  for (int row = 0; row < rows; row++)
    for (int column = 0; column < columns; column++) {
      int lane, element;
      locate(layout, columns, row, column, &lane, &element);
      const MatrixProduct *own = lanes[lane]->arguments;
      const float *from = (operand == 0 ? own->left : operand == 1 ? own->right : own->out) + element;
      matrix[row * columns + column] = *from;
      if (launch.checked && initialised) initialised = is_initialised(from, 4);
    }
  return initialised;
}

static float dot_at(const MatrixShape *s, const float *left, const float *right, int row, int column, float sum) {
  for (int k = 0; k < s->depth; k++) {
    float a = s->transpose_left ? left[k * s->rows + row] : left[row * s->depth + k];
    float b = s->transpose_right ? right[column * s->depth + k] : right[k * s->columns + column];
    sum = __builtin_fmaf(a, b, sum);
  }
  return sum;
}

/* Sequential fused multiply-adds over the depth: the hardware's order is unknown. */
static void do_matrix(Fiber **lanes, uint32_t active) {
  enum { LARGEST = 128 * 128 };
  static float left[LARGEST], right[LARGEST], out[LARGEST];
  uint32_t first = (uint32_t)__builtin_ctz(active);
  const MatrixShape *s = ((MatrixProduct *)lanes[first]->arguments)->shape;
  current = lanes[first];
  if (active != 0xffffffffu) {
    add_finding("simd-inactive-lane", current->pc, "matrix operation with %d of 32 lanes active",
                __builtin_popcount(active));
    return;
  }
  if (s->rows * s->depth > LARGEST || s->columns * s->depth > LARGEST || s->rows * s->columns > LARGEST) {
    add_finding("unsupported", current->pc, "matrix product %dx%dx%d is too large", s->rows, s->columns, s->depth);
    return;
  }
  int l_rows = s->transpose_left ? s->depth : s->rows, l_columns = s->transpose_left ? s->rows : s->depth;
  int r_rows = s->transpose_right ? s->columns : s->depth, r_columns = s->transpose_right ? s->depth : s->columns;
  bool initialised = collect(lanes, s->layout, l_rows, l_columns, 0, left);
  initialised &= collect(lanes, s->layout, r_rows, r_columns, 1, right);
  if (s->accumulate) initialised &= collect(lanes, s->layout, s->rows, s->columns, 2, out);
  if (!initialised) add_finding("uninitialised-private", current->pc, "operand of a matrix operation");
  for (int row = 0; row < s->rows; row++)
    for (int column = 0; column < s->columns; column++) {
      int lane, element;
      locate(s->layout, s->columns, row, column, &lane, &element);
      float *to = ((MatrixProduct *)lanes[lane]->arguments)->out + element;
      *to = dot_at(s, left, right, row, column, s->accumulate ? out[row * s->columns + column] : 0.0f);
      mark_initialised(to, 4);
    }
}

/* out = left * right (+ out): every lane passes its own elements, as floats. */
void msl_matrix_product(const MatrixShape *shape, float *out, const float *left, const float *right) {
  MatrixProduct arguments = {shape, left, right, out};
  simd_operation(do_matrix, &arguments, CALLER);
}
