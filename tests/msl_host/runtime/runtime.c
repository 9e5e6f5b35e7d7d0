/* Fibers, scheduler, SIMD operations, barriers and the launch itself. */
#define _GNU_SOURCE
#include "runtime.h"

#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

Launch launch;
Fiber *current;

static void *scheduler_stack;
static void (*kernel_entry)(void);
static uint64_t random_state;

/* ---- context switch ----------------------------------------------------- */

/* Save the callee-saved registers on this stack, store its pointer in *save, go on at `load`. */
void msl_switch(void **save, void *load);

#if defined(__x86_64__)
enum { SAVED_WORDS = 6 };
__asm__(
    ".text\n.globl msl_switch\n.type msl_switch,@function\nmsl_switch:\n"
    "  pushq %rbx\n  pushq %rbp\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp,(%rdi)\n  movq %rsi,%rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbp\n  popq %rbx\n"
    "  ret\n");
#elif defined(__aarch64__)
/* x19-x30 and d8-d15; the return address is x30, saved second to last. */
enum { SAVED_WORDS = 20 };
__asm__(
    ".text\n.globl msl_switch\n.type msl_switch,%function\nmsl_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#else
#error "the host executor knows x86-64 and aarch64 only"
#endif

static void fiber_main(void) {
  kernel_entry();
  if (launch.checked) check_pending_store();
  current->state = FINISHED;
  launch.progress++;
  fiber_yield();
  abort();
}

static void fiber_prepare(Fiber *fiber, uint8_t *stack) {
  /* Tops at different places in a page: otherwise all stacks compete for the same cache lines. */
  size_t colour = fiber->thread % SIMD_WIDTH * 576;
  void **top = (void **)(stack + STACK_BYTES - colour) - 2;
#if defined(__x86_64__)
  *--top = NULL; /* keeps the stack 16-byte aligned at entry */
  *--top = (void *)fiber_main;
  for (int i = 0; i < SAVED_WORDS; i++) *--top = NULL;
#else
  top -= SAVED_WORDS;
  memset(top, 0, SAVED_WORDS * sizeof(void *));
  top[11] = (void *)fiber_main; /* x30 */
#endif
  fiber->stack_pointer = top;
  fiber->state = RUNNABLE;
}

void fiber_yield(void) {
  launch.statistics.switches++;
  msl_switch(&current->stack_pointer, scheduler_stack);
}

/* End the launch: the scheduler never comes back to any fiber. */
void fiber_abort(void) {
  launch.aborted = true;
  current->state = FINISHED;
  fiber_yield();
  abort();
}

static void fiber_run(Fiber *fiber) {
  current = fiber;
  msl_switch(&scheduler_stack, fiber->stack_pointer);
  current = NULL;
}

/* ---- findings ----------------------------------------------------------- */

static bool already_found(const char *kind, uint64_t pc) {
  for (uint32_t i = 0; i < launch.finding_count; i++)
    if (launch.findings[i].pc == pc && !strcmp(launch.findings[i].kind, kind)) return true;
  return false;
}

Finding *last_finding(void) { return &launch.findings[launch.finding_count - 1]; }

/* Record a finding of the current thread, once for each kind and place in the code. */
void add_finding(const char *kind, uintptr_t pc, const char *format, ...) {
  uint64_t offset = pc >= launch.library_base && pc < launch.library_end ? pc - launch.library_base : 0;
  if (launch.finding_count == MAX_FINDINGS || already_found(kind, offset)) return;
  Finding *finding = &launch.findings[launch.finding_count++];
  memset(finding, 0, sizeof *finding);
  snprintf(finding->kind, sizeof finding->kind, "%s", kind);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(finding->text, sizeof finding->text, format, arguments);
  va_end(arguments);
  finding->pc = offset;
  if (!current) return;
  memcpy(finding->group, current->group->position, sizeof finding->group);
  finding->thread = current->thread;
  finding->simd = current->simd;
  finding->lane = current->lane;
}

/* ---- what kernels call -------------------------------------------------- */

enum Attribute {
  POSITION_IN_GRID, POSITION_IN_THREADGROUP, THREADGROUP_POSITION, THREADS_PER_THREADGROUP,
  THREADS_PER_GRID, THREADGROUPS_PER_GRID, DISPATCH_THREADS_PER_THREADGROUP,
  LANE, SIMDGROUP, THREAD_INDEX, SIMDGROUPS, DISPATCH_SIMDGROUPS, WIDTH,
  QUADGROUP, QUAD_LANE, QUADGROUPS,
};

uint32_t msl_lane(void) { return current->lane; }

/* Component `axis` (0 for scalars) of one of Metal's kernel input attributes. */
uint32_t msl_attribute(uint32_t which, uint32_t axis) {
  const Group *group = current->group;
  uint32_t full = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  switch ((enum Attribute)which) {
    case POSITION_IN_GRID: return group->position[axis] * launch.threadgroup[axis] + current->position[axis];
    case POSITION_IN_THREADGROUP: return current->position[axis];
    case THREADGROUP_POSITION: return group->position[axis];
    case THREADS_PER_THREADGROUP: return group->size[axis];
    case THREADS_PER_GRID: return launch.grid[axis];
    case THREADGROUPS_PER_GRID: return launch.groups[axis];
    case DISPATCH_THREADS_PER_THREADGROUP: return launch.threadgroup[axis];
    case LANE: return current->lane;
    case SIMDGROUP: return current->simd;
    case THREAD_INDEX: return current->thread;
    case SIMDGROUPS: return group->simdgroups;
    case DISPATCH_SIMDGROUPS: return (full + SIMD_WIDTH - 1) / SIMD_WIDTH;
    case WIDTH: return SIMD_WIDTH;
    case QUADGROUP: return current->thread / 4;
    case QUAD_LANE: return current->thread % 4;
    case QUADGROUPS: return (group->threads + 3) / 4;
  }
  return 0;
}

/* Address of buffer argument `index`, NULL if none was passed. */
void *msl_buffer(uint32_t index) { return index < launch.buffer_count ? launch.buffers[index].base : NULL; }

/* Address of a threadgroup declaration in this group's memory; placed at first use. */
void *msl_threadgroup(uint32_t id, uint64_t size, const char *name) {
  Group *group = current->group;
  for (uint32_t i = 0; i < group->slot_count; i++)
    if (group->slots[i].id == id && group->slots[i].size == size) return group->memory + group->slots[i].offset;
  uint64_t offset = group->slot_count ? (group->memory_used + GAP + 15) & ~15ull : 0;
  if (offset + size + GAP > GROUP_MEMORY || group->slot_count == MAX_SLOTS) {
    add_finding("threadgroup-memory-size", CALLER, "'%s' needs %lu bytes more", name, (unsigned long)size);
    fiber_abort();
  }
  group->slots[group->slot_count++] = (Slot){id, name, offset, size};
  group->memory_used = offset + size;
  group->memory_dirty = group->memory_used + GAP;
  uint64_t total = 0;
  for (uint32_t i = 0; i < group->slot_count; i++) total += (group->slots[i].size + 15) & ~15ull;
  if (total > launch.statistics.threadgroup_bytes) launch.statistics.threadgroup_bytes = total;
  if (total > GROUP_MEMORY_LIMIT)
    add_finding("threadgroup-memory-size", CALLER, "%lu bytes with '%s'; Metal allows %d", (unsigned long)total, name,
                GROUP_MEMORY_LIMIT);
  return group->memory + offset;
}

/* Address of the `[[threadgroup(index)]]` argument, sized by the host. */
void *msl_threadgroup_argument(uint32_t index, const char *name) {
  uint64_t size = index < launch.threadgroup_size_count ? launch.threadgroup_sizes[index] : 0;
  return msl_threadgroup(0x80000000u + index, size, name);
}

static void wait_for(enum FiberState state, uintptr_t pc) {
  if (launch.checked) check_pending_store();
  current->pc = pc;
  current->state = state;
  fiber_yield();
}

/* threadgroup_barrier (scope 0) and simdgroup_barrier (scope 1). */
void msl_barrier(uint32_t mem_flags, uint32_t scope) {
  current->mem_flags = mem_flags;
  wait_for(scope ? AT_SIMD_BARRIER : AT_GROUP_BARRIER, CALLER);
}

static void simd_operation(SimdOperation operation, void *arguments, uintptr_t pc) {
  current->operation = operation;
  current->arguments = arguments;
  wait_for(AT_SIMD, pc);
}

/* ---- SIMD operations: each runs once, on all lanes that wait at one place ---- */

#define FOR_ACTIVE(lane, active) \
  for (uint32_t lane = 0; lane < SIMD_WIDTH; lane++) \
    if ((active) >> lane & 1)

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

/* ---- scheduler ---------------------------------------------------------- */

static uint64_t next_random(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

static bool is_random(void) { return launch.options & OPTION_RANDOM; }

static void shuffle_order(uint32_t *order, uint32_t count) {
  for (uint32_t i = count; is_random() && i > 1; i--) {
    uint32_t j = (uint32_t)(next_random() % i), kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
  }
}

static void advance_times(uint32_t *times, uint32_t mem_flags) {
  launch.now++;
  if (mem_flags & MEM_DEVICE) times[DEVICE] = launch.now;
  if (mem_flags & MEM_THREADGROUP) times[THREADGROUP] = launch.now;
}

static bool waits_in_simd(const Fiber *fiber) { return fiber->state == AT_SIMD || fiber->state == AT_SIMD_BARRIER; }

/* Resolve the SIMD operation or barrier at the lowest waiting place. False: no lane waits for one. */
static bool resolve_simd(Group *group, uint32_t simd, uint32_t count) {
  Fiber *fibers = group->fibers + simd * SIMD_WIDTH;
  Fiber *first = NULL;
  for (uint32_t i = 0; i < count; i++)
    if (waits_in_simd(&fibers[i]) && (!first || fibers[i].pc < first->pc)) first = &fibers[i];
  if (!first) return false;
  Fiber *lanes[SIMD_WIDTH] = {0};
  uint32_t active = 0, flags = 0;
  enum FiberState state = first->state;
  uintptr_t pc = first->pc;
  for (uint32_t i = 0; i < count; i++) {
    if (!waits_in_simd(&fibers[i]) || fibers[i].pc != pc) continue;
    lanes[i] = &fibers[i];
    active |= 1u << i;
    flags |= fibers[i].mem_flags;
  }
  if ((uint32_t)__builtin_popcount(active) != count) launch.statistics.divergent_operations++;
  launch.progress++;
  if (state == AT_SIMD) {
    launch.statistics.simd_operations++;
    current = first; /* the operation looks at memory of the group, and may add findings */
    first->operation(lanes, active);
    current = NULL;
    if (launch.options & OPTION_LOCKSTEP) advance_times(group->simd_time[simd], MEM_DEVICE | MEM_THREADGROUP);
  } else {
    launch.statistics.simdgroup_barriers++;
    advance_times(group->simd_time[simd], flags);
  }
  FOR_ACTIVE(lane, active) lanes[lane]->state = RUNNABLE;
  return true;
}

/* Run one SIMD-group until its lanes are finished, wait for the threadgroup, or spin on an atomic. */
static bool run_simdgroup(Group *group, uint32_t simd) {
  uint32_t count = group->threads - simd * SIMD_WIDTH, order[SIMD_WIDTH];
  if (count > SIMD_WIDTH) count = SIMD_WIDTH;
  for (uint32_t i = 0; i < count; i++) order[i] = i;
  bool ran = false;
  for (;;) {
    bool spinning = false;
    shuffle_order(order, count);
    for (uint32_t i = 0; i < count; i++) {
      Fiber *fiber = &group->fibers[simd * SIMD_WIDTH + order[i]];
      if (fiber->state != RUNNABLE) continue;
      fiber_run(fiber);
      ran = true;
      if (launch.aborted) return true;
      spinning |= fiber->state == RUNNABLE;
    }
    if (spinning) return true;
    if (!resolve_simd(group, simd, count)) return ran;
    if (is_random() && next_random() % 4 == 0) return true;
  }
}

/* All threads of the group are finished or at a threadgroup barrier. False: all are finished. */
static bool resolve_group_barrier(Group *group) {
  Fiber *first = NULL, *other_place = NULL;
  uint32_t finished = 0, flags = 0;
  for (uint32_t i = 0; i < group->threads; i++) {
    Fiber *fiber = &group->fibers[i];
    if (fiber->state == FINISHED) {
      finished++;
      continue;
    }
    flags |= fiber->mem_flags;
    if (!first) first = fiber;
    if (fiber->pc != first->pc || fiber->barriers != first->barriers) other_place = fiber;
  }
  if (!first) return false;
  current = first;
  if (finished)
    add_finding("barrier-divergence", first->pc, "%u of %u threads finished without reaching this barrier", finished,
                group->threads);
  if (other_place) {
    add_finding("barrier-divergence", first->pc, "thread %u waits at another barrier", other_place->thread);
    current = other_place;
    add_finding("barrier-divergence", other_place->pc, "thread %u waits at another barrier", first->thread);
  }
  current = NULL;
  launch.statistics.threadgroup_barriers++;
  launch.progress++;
  advance_times(group->barrier_time, flags);
  for (uint32_t i = 0; i < group->threads; i++) {
    if (group->fibers[i].state != AT_GROUP_BARRIER) continue;
    group->fibers[i].state = RUNNABLE;
    group->fibers[i].barriers++;
  }
  return true;
}

/* Run every SIMD-group of a threadgroup once. False: the threadgroup is finished. */
static bool run_group(Group *group) {
  uint32_t order[MAX_SIMDGROUPS];
  for (uint32_t i = 0; i < group->simdgroups; i++) order[i] = i;
  shuffle_order(order, group->simdgroups);
  bool ran = false;
  for (uint32_t i = 0; i < group->simdgroups && !launch.aborted; i++) ran |= run_simdgroup(group, order[i]);
  return ran || resolve_group_barrier(group);
}

/* ---- launch ------------------------------------------------------------- */

void *map_memory(size_t size) {
  void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    fprintf(stderr, "msl_host: cannot map %zu bytes\n", size);
    abort();
  }
  return memory;
}

void unmap_memory(void *memory, size_t size) {
  if (memory) munmap(memory, size);
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void start_fiber(Group *group, uint32_t thread) {
  Fiber *fiber = &group->fibers[thread];
  OrderList pending = fiber->pending, release = fiber->release;
  memset(fiber, 0, offsetof(Fiber, msan));
  if (launch.checked) {
    memset(fiber->msan.retval, 0, sizeof fiber->msan.retval);
    memset(fiber->msan.param, 0, sizeof fiber->msan.param);
  }
  fiber->pending = pending;
  fiber->release = release;
  fiber->pending.count = fiber->release.count = 0;
  fiber->group = group;
  fiber->thread = thread;
  fiber->simd = thread / SIMD_WIDTH;
  fiber->lane = thread % SIMD_WIDTH;
  fiber->position[0] = thread % group->size[0];
  fiber->position[1] = thread / group->size[0] % group->size[1];
  fiber->position[2] = thread / (group->size[0] * group->size[1]);
  fiber->stack = group->stacks + (size_t)thread * STACK_BYTES;
  fiber->stack_shadow = group->stack_shadow ? group->stack_shadow + (size_t)thread * STACK_BYTES : NULL;
  fiber_prepare(fiber, fiber->stack);
}

/* Make `group` the threadgroup with linear index `index`. */
static void start_group(Group *group, uint32_t index) {
  group->live = true;
  group->index = index;
  group->position[0] = index % launch.groups[0];
  group->position[1] = index / launch.groups[0] % launch.groups[1];
  group->position[2] = index / launch.groups[0] / launch.groups[1];
  for (int d = 0; d < 3; d++)
    group->size[d] = smaller(launch.threadgroup[d], launch.grid[d] - group->position[d] * launch.threadgroup[d]);
  group->threads = group->size[0] * group->size[1] * group->size[2];
  group->simdgroups = (group->threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  launch.now++;
  group->barrier_time[0] = group->barrier_time[1] = launch.now;
  for (uint32_t i = 0; i < MAX_SIMDGROUPS; i++) group->simd_time[i][0] = group->simd_time[i][1] = launch.now;
  memset(group->memory, 0xff, group->memory_dirty);
  if (launch.checked) cells_reset(&group->cells, group->memory_dirty);
  group->slot_count = 0;
  group->memory_used = group->memory_dirty = 0;
  group->acquired.count = 0;
  for (uint32_t i = 0; i < group->threads; i++) start_fiber(group, i);
}

static void create_resident(uint32_t count, uint32_t threads) {
  launch.resident_count = count;
  launch.resident = map_memory(count * sizeof(Group));
  for (uint32_t i = 0; i < count; i++) {
    Group *group = &launch.resident[i];
    group->fibers = map_memory(threads * sizeof(Fiber));
    group->stacks = map_memory((size_t)threads * STACK_BYTES);
    group->memory = map_memory(GROUP_MEMORY);
    group->memory_dirty = GROUP_MEMORY;
    if (!launch.checked) continue;
    group->stack_shadow = map_memory((size_t)threads * STACK_BYTES);
    cells_create(&group->cells, GROUP_MEMORY, false);
  }
}

static void destroy_resident(uint32_t threads) {
  for (uint32_t i = 0; i < launch.resident_count; i++) {
    Group *group = &launch.resident[i];
    for (uint32_t t = 0; t < threads; t++) {
      order_list_free(&group->fibers[t].pending);
      order_list_free(&group->fibers[t].release);
    }
    order_list_free(&group->acquired);
    unmap_memory(group->fibers, threads * sizeof(Fiber));
    unmap_memory(group->stacks, (size_t)threads * STACK_BYTES);
    unmap_memory(group->memory, GROUP_MEMORY);
    unmap_memory(group->stack_shadow, (size_t)threads * STACK_BYTES);
    if (launch.checked) cells_destroy(&group->cells, GROUP_MEMORY);
  }
  unmap_memory(launch.resident, launch.resident_count * sizeof(Group));
}

static size_t pages_of(uint64_t size) { return size / ARENA_PAGE + 1; }

/* Copy buffers into an arena with at least one guard page before and after each. */
static void create_arena(void) {
  size_t pages = 1;
  for (uint32_t i = 0; i < launch.buffer_count; i++) pages += pages_of(launch.buffers[i].size) + 1;
  uint8_t *mapped = map_memory(pages * ARENA_PAGE);
  launch.arena = mapped;
  launch.arena_end = mapped + pages * ARENA_PAGE;
  launch.arena_owner = calloc(pages, 1);
  size_t page = 1;
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer *buffer = &launch.buffers[i];
    buffer->base = NULL;
    if (!buffer->host) continue;
    size_t count = pages_of(buffer->size);
    memset(launch.arena + (page - 1) * ARENA_PAGE, 0xa5, ARENA_PAGE);
    memset(launch.arena + (page + count - 1) * ARENA_PAGE, 0xa5, 2 * ARENA_PAGE);
    buffer->base = launch.arena + page * ARENA_PAGE;
    memcpy(buffer->base, buffer->host, buffer->size);
    memset(launch.arena_owner + page, (int)i + 1, count);
    if (launch.checked && buffer->writable) cells_create(&buffer->cells, buffer->size, buffer->initialised);
    else if (launch.checked) cells_create_flags(&buffer->cells, buffer->size);
    page += count + 1;
  }
}

static bool is_untouched(const uint8_t *from, const uint8_t *to) {
  for (; from < to; from++)
    if (*from != 0xa5) return false;
  return true;
}

/* Copy results out and look at the guard bytes around every buffer. */
static void destroy_arena(void) {
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer *buffer = &launch.buffers[i];
    if (!buffer->base) continue;
    if (buffer->writable) memcpy(buffer->host, buffer->base, buffer->size);
    const uint8_t *end = buffer->base + buffer->size;
    const uint8_t *guard_end = buffer->base + pages_of(buffer->size) * ARENA_PAGE + ARENA_PAGE;
    if (!is_untouched(buffer->base - ARENA_PAGE, buffer->base) || !is_untouched(end, guard_end))
      add_finding("device-out-of-bounds", 0, "guard bytes around '%s' were overwritten", buffer->name);
    if (launch.checked) cells_destroy(&buffer->cells, buffer->size);
  }
  free(launch.arena_owner);
  unmap_memory(launch.arena, (size_t)(launch.arena_end - launch.arena));
}

static void report_spin(void) {
  for (uint32_t i = 0; i < launch.resident_count; i++) {
    Group *group = &launch.resident[i];
    for (uint32_t t = 0; group->live && t < group->threads; t++) {
      if (group->fibers[t].state != RUNNABLE) continue;
      current = &group->fibers[t];
      add_finding("endless-spin", current->pc,
                  "no thread made progress while this one polled%s",
                  launch.groups_waiting ? "; threadgroups not started yet may be what it waits for" : "");
      current = NULL;
      return;
    }
  }
}

/* Run threadgroups in `order`, `resident_count` of them at a time. */
static void run_all(const uint32_t *order, uint32_t total) {
  uint32_t started = 0, idle = 0;
  uint64_t progress = launch.progress;
  for (;;) {
    bool live = false;
    for (uint32_t i = 0; i < launch.resident_count; i++) {
      Group *group = &launch.resident[i];
      if (!group->live && started < total) {
        start_group(group, order[started++]);
        launch.groups_waiting = total - started;
      }
      if (!group->live) continue;
      live = true;
      group->live = run_group(group);
      if (launch.aborted) return;
    }
    if (!live) return;
    idle = launch.progress == progress ? idle + 1 : 0;
    progress = launch.progress;
    if (idle > SPIN_ROUNDS) {
      report_spin();
      launch.aborted = true;
      return;
    }
  }
}

static int find_library(struct dl_phdr_info *info, size_t size, void *name) {
  (void)size;
  if (!info->dlpi_name || strcmp(info->dlpi_name, (const char *)name)) return 0;
  launch.library_base = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    uint64_t end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_LOAD && end > launch.library_end) launch.library_end = end;
  }
  return 1;
}

/* ---- signals: wild addresses, traps, and kernels that never end ---------- */

static const int caught_signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGPROF};
enum { CAUGHT = sizeof caught_signals / sizeof caught_signals[0] };
static struct sigaction kept_actions[CAUGHT];
static stack_t kept_stack;
static void *signal_stack;
static timer_t limit_timer;

static uintptr_t interrupted_pc(const ucontext_t *context) {
#if defined(__x86_64__)
  return (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
#else
  return (uintptr_t)context->uc_mcontext.pc;
#endif
}

/* The innermost return address into the kernel on the interrupted stack, 0 if none is near. */
static uint64_t calling_pc(const ucontext_t *context) {
  enum { WORDS = 128 };
#if defined(__x86_64__)
  const uint64_t *word = (const uint64_t *)context->uc_mcontext.gregs[REG_RSP];
#else
  const uint64_t *word = (const uint64_t *)context->uc_mcontext.sp;
#endif
  const uint64_t *end = (const uint64_t *)(current->stack + STACK_BYTES);
  if ((const uint8_t *)word < current->stack) return 0;
  for (int i = 0; i < WORDS && word < end; i++, word++)
    if (*word >= launch.library_base && *word < launch.library_end) return *word - launch.library_base;
  return 0;
}

static void on_signal(int number, siginfo_t *info, void *context) {
  if (!current) {
    if (number == SIGPROF) return;
    signal(number, SIG_DFL); /* not the kernel's doing: let it happen again */
    return;
  }
  uint32_t before = launch.finding_count;
  uintptr_t pc = interrupted_pc(context) + 1; /* findings hold return addresses */
  if (number == SIGPROF)
    add_finding("time-limit", pc, "still running after the time limit");
  else if (number == SIGFPE)
    add_finding("division-by-zero", pc, "integer division");
  else if (number == SIGILL)
    add_finding("private-out-of-bounds", pc, "beyond a private array (or other code the compiler holds impossible)");
  else
    add_finding("wild-address", pc, "access to address %p", info->si_addr);
  if (launch.finding_count > before) last_finding()->outer_pc = calling_pc(context);
  fiber_abort();
}

static void catch_signals(double seconds) {
  struct sigaction action = {0};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  signal_stack = map_memory(STACK_BYTES);
  stack_t stack = {.ss_sp = signal_stack, .ss_size = STACK_BYTES};
  sigaltstack(&stack, &kept_stack);
  for (int i = 0; i < CAUGHT; i++) sigaction(caught_signals[i], &action, &kept_actions[i]);
  struct sigevent event = {0};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGPROF;
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
  event.sigev_notify_thread_id = gettid();
  timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &limit_timer);
  struct itimerspec limit = {0};
  limit.it_value.tv_sec = (time_t)seconds;
  limit.it_value.tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9);
  limit.it_interval.tv_nsec = 100 * 1000 * 1000;
  timer_settime(limit_timer, 0, &limit, NULL);
}

static void release_signals(void) {
  timer_delete(limit_timer);
  for (int i = 0; i < CAUGHT; i++) sigaction(caught_signals[i], &kept_actions[i], NULL);
  if (!(kept_stack.ss_flags & SS_DISABLE)) sigaltstack(&kept_stack, NULL);
  else sigaltstack(&(stack_t){.ss_flags = SS_DISABLE}, NULL);
  unmap_memory(signal_stack, STACK_BYTES);
}

static uint32_t float_mode(uint32_t options) {
#if defined(__x86_64__)
  uint32_t kept = _mm_getcsr();
  if (options & OPTION_FLUSH) _mm_setcsr(kept | 0x8040);
  return kept;
#else
  (void)options;
  return 0;
#endif
}

static void restore_float_mode(uint32_t kept) {
#if defined(__x86_64__)
  _mm_setcsr(kept);
#else
  (void)kept;
#endif
}

/* Arguments of one launch, filled in by run.py. */
typedef struct {
  void (*entry)(void);
  const char *library;
  Buffer *buffers;
  const uint64_t *threadgroup_sizes;
  uint32_t buffer_count, threadgroup_size_count;
  uint32_t grid[3], threadgroup[3]; /* both in threads */
  uint32_t options, checked, resident;
  uint64_t seed;
  double time_limit; /* processor seconds */
  Statistics statistics;
  Finding *findings;
  uint32_t finding_count, aborted;
} LaunchArguments;

uint64_t msl_sizeof_arguments(void) { return sizeof(LaunchArguments); }
uint64_t msl_sizeof_finding(void) { return sizeof(Finding); }

static void prepare_launch(const LaunchArguments *arguments) {
  memset(&launch, 0, sizeof launch);
  launch.checked = arguments->checked;
  launch.options = arguments->options;
  launch.buffers = arguments->buffers;
  launch.buffer_count = arguments->buffer_count;
  launch.threadgroup_sizes = arguments->threadgroup_sizes;
  launch.threadgroup_size_count = arguments->threadgroup_size_count;
  launch.now = 1;
  for (int d = 0; d < 3; d++) {
    launch.grid[d] = arguments->grid[d];
    launch.threadgroup[d] = arguments->threadgroup[d];
    launch.groups[d] = (launch.grid[d] + launch.threadgroup[d] - 1) / launch.threadgroup[d];
  }
  kernel_entry = arguments->entry;
  random_state = arguments->seed * 2654435761u + 88172645463325252ull;
  dl_iterate_phdr(find_library, (void *)arguments->library);
}

/* Run one kernel over its whole grid. run.py has checked sizes. */
void msl_run(LaunchArguments *arguments) {
  prepare_launch(arguments);
  uint32_t total = launch.groups[0] * launch.groups[1] * launch.groups[2];
  uint32_t threads = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  uint32_t *order = malloc(total * sizeof *order);
  for (uint32_t i = 0; i < total; i++) order[i] = i;
  shuffle_order(order, total);
  create_arena();
  create_resident(smaller(arguments->resident, total), threads);
  catch_signals(arguments->time_limit);
  uint32_t kept = float_mode(launch.options);
  run_all(order, total);
  restore_float_mode(kept);
  release_signals();
  current = NULL;
  launch.statistics.threadgroups = total;
  if (launch.checked) count_unique_bytes();
  destroy_arena();
  destroy_resident(threads);
  orders_clear();
  free(order);
  arguments->statistics = launch.statistics;
  memcpy(arguments->findings, launch.findings, sizeof launch.findings);
  arguments->finding_count = launch.finding_count;
  arguments->aborted = launch.aborted;
}
