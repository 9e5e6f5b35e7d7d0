/* Fibers, findings, what kernels call, scheduler, and the launch itself. */
#define _GNU_SOURCE
#include "runtime.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

Launch launch;
Fiber *current;
bool fiber_is_running;

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
  fiber_is_running = true;
  msl_switch(&scheduler_stack, fiber->stack_pointer);
  fiber_is_running = false;
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
  if (size > GROUP_MEMORY || offset + size > GROUP_MEMORY || group->slot_count == MAX_SLOTS) {
    add_finding("threadgroup-memory-size", CALLER, "'%s' needs %lu bytes more", name, (unsigned long)size);
    fiber_abort();
  }
  group->slots[group->slot_count++] = (Slot){id, name, offset, size};
  group->memory_used = offset + size;
  memset(group->memory + offset, 0xff, size);
  if (launch.checked) cells_reset(&group->cells, offset, size);
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

/* Differs where a function with a barrier was called from different places: walks the frames of the kernel. */
static uint64_t calls_to_here(void *const *frame) {
  uint64_t calls = 0;
  const uint8_t *end = current->stack + STACK_BYTES;
  for (int depth = 0; depth < 64 && (const uint8_t *)frame > current->stack && (const uint8_t *)(frame + 2) <= end; depth++) {
    uintptr_t pc = (uintptr_t)frame[1];
    if (pc < launch.library_base || pc >= launch.library_end) break;
    calls = (calls ^ pc) * 0x9e3779b97f4a7c15u;
    frame = frame[0];
  }
  return calls;
}

/* threadgroup_barrier (scope 0) and simdgroup_barrier (scope 1). */
void msl_barrier(uint32_t mem_flags, uint32_t scope) {
  current->mem_flags = mem_flags;
  current->calls = launch.checked ? calls_to_here(__builtin_frame_address(0)) : 0;
  wait_for(scope ? AT_SIMD_BARRIER : AT_GROUP_BARRIER, CALLER);
}

/* Wait until `operation` has been run on all lanes that come here. */
void simd_operation(SimdOperation operation, void *arguments, uintptr_t pc) {
  current->operation = operation;
  current->arguments = arguments;
  wait_for(AT_SIMD, pc);
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
    if (fiber->pc != first->pc || fiber->calls != first->calls || fiber->barriers != first->barriers)
      other_place = fiber;
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

/* Addresses without memory, for mprotect to open. */
static uint8_t *reserve(size_t size) {
  void *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory != MAP_FAILED) return memory;
  fprintf(stderr, "msl_host: cannot reserve %zu bytes of addresses\n", size);
  abort();
}

/* Memory that overruns cannot leave. */
void *map_guarded(size_t size) {
  uint8_t *memory = reserve(size + 2 * GUARD) + GUARD;
  mprotect(memory, size, PROT_READ | PROT_WRITE);
  return memory;
}

void unmap_guarded(void *memory, size_t size) {
  if (memory) munmap((uint8_t *)memory - GUARD, size + 2 * GUARD);
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
  group->slot_count = 0;
  group->memory_used = 0;
  group->acquired.count = 0;
  for (uint32_t i = 0; i < group->threads; i++) start_fiber(group, i);
}

static void create_resident(uint32_t count, uint32_t threads) {
  launch.resident_count = count;
  launch.resident = map_memory(count * sizeof(Group));
  for (uint32_t i = 0; i < count; i++) {
    Group *group = &launch.resident[i];
    group->fibers = map_memory(threads * sizeof(Fiber));
    group->stacks = map_guarded((size_t)threads * STACK_BYTES);
    group->memory = map_guarded(GROUP_MEMORY);
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
    unmap_guarded(group->stacks, (size_t)threads * STACK_BYTES);
    unmap_guarded(group->memory, GROUP_MEMORY);
    unmap_memory(group->stack_shadow, (size_t)threads * STACK_BYTES);
    if (launch.checked) cells_destroy(&group->cells, GROUP_MEMORY);
  }
  unmap_memory(launch.resident, launch.resident_count * sizeof(Group));
}

static size_t pages_of(uint64_t size) { return size / ARENA_PAGE + 1; }

/* Copy each buffer into its window of the arena, with a guard page before it and after. */
static void create_arena(void) {
  launch.arena_size = (uint64_t)launch.buffer_count << WINDOW_BITS;
  launch.arena = reserve(launch.arena_size + ARENA_PAGE); /* not empty without buffers either */
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer *buffer = &launch.buffers[i];
    buffer->base = NULL;
    if (!buffer->host) continue;
    size_t bytes = pages_of(buffer->size) * ARENA_PAGE;
    buffer->base = launch.arena + ((uint64_t)i << WINDOW_BITS) + (1ull << (WINDOW_BITS - 1));
    mprotect(buffer->base - ARENA_PAGE, bytes + 2 * ARENA_PAGE, PROT_READ | PROT_WRITE);
    memset(buffer->base - ARENA_PAGE, 0xa5, ARENA_PAGE);
    memset(buffer->base + bytes - ARENA_PAGE, 0xa5, 2 * ARENA_PAGE);
    memcpy(buffer->base, buffer->host, buffer->size);
    if (launch.checked && buffer->writable) cells_create(&buffer->cells, buffer->size, buffer->initialised);
    else if (launch.checked) cells_create_flags(&buffer->cells, buffer->size);
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
  unmap_memory(launch.arena, launch.arena_size + ARENA_PAGE);
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
