/* Checks of every load and store of an instrumented kernel.
 *
 * clang's kernel-memory instrumentation asks the runtime, for each access, where
 * the shadow of that address is. Answering is the place to find out-of-bounds
 * accesses, races and reads of memory nobody wrote; the shadow itself (one byte a
 * byte, non-zero = uninitialised) follows values through registers and private
 * memory.
 */
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NO_SHADOW = 64 * 1024 };
static uint8_t clean_shadow[NO_SHADOW];   /* for loads from memory that is always initialised */
static uint8_t ignored_shadow[NO_SHADOW]; /* for stores whose shadow nobody reads */
static uint32_t ignored_origin[NO_SHADOW / 4];

typedef struct {
  void *shadow;
  uint32_t *origin;
} MetadataPointers;

/* ---- cells --------------------------------------------------------------- */

/* Enough for memory that is only read: which bytes were. */
void cells_create_flags(Cells *cells, uint64_t size) { cells->flags = map_memory(size + 1); }

void cells_create(Cells *cells, uint64_t size, bool initialised) {
  cells_create_flags(cells, size);
  cells->shadow = map_memory(size + 1);
  cells->writer = map_memory((size + 1) * sizeof(Access));
  cells->reader = map_memory((size + 1) * sizeof(Access));
  if (!initialised) memset(cells->shadow, 0xff, size);
}

void cells_destroy(Cells *cells, uint64_t size) {
  unmap_memory(cells->shadow, size + 1);
  unmap_memory(cells->writer, (size + 1) * sizeof(Access));
  unmap_memory(cells->reader, (size + 1) * sizeof(Access));
  unmap_memory(cells->flags, size + 1);
  memset(cells, 0, sizeof *cells);
}

/* Forget everything about `size` bytes. */
void cells_reset(Cells *cells, uint64_t from, uint64_t size) {
  memset(cells->shadow + from, 0xff, size);
  memset(cells->writer + from, 0, size * sizeof(Access));
  memset(cells->reader + from, 0, size * sizeof(Access));
  memset(cells->flags + from, 0, size);
}

/* ---- order between accesses ---------------------------------------------- */

static uint32_t group_of(Access a) { return (uint32_t)(a >> 10 & 0x3fffff) - 1; }
static uint32_t thread_of(Access a) { return (uint32_t)(a & 0x3ff); }
static uint32_t time_of(Access a) { return (uint32_t)(a >> 32); }

/* The current thread's access, now. */
Access make_access(void) {
  return (Access)launch.now << 32 | (Access)(current->group->index + 1) << 10 | current->thread;
}

static bool same_simdgroup(Access a) {
  return group_of(a) == current->group->index && thread_of(a) / SIMD_WIDTH == current->simd;
}

static bool before_group_barrier(Access a, enum Space space) {
  return group_of(a) == current->group->index && time_of(a) < current->group->barrier_time[space];
}

static bool before_simd_barrier(Access a, enum Space space) {
  return same_simdgroup(a) && time_of(a) < current->group->simd_time[current->simd][space];
}

/* True where `earlier` happened before the current thread's next access. */
bool is_ordered(Access earlier, enum Space space) {
  if (group_of(earlier) == current->group->index && thread_of(earlier) == current->thread) return true;
  return before_group_barrier(earlier, space) || before_simd_barrier(earlier, space) ||
         find_order(&current->group->acquired, earlier, space);
}

/* Who, besides the last reader, may have read the byte since it was written. */
static uint8_t widen_readers(Access last, uint8_t readers, enum Space space) {
  if (!last) return 0;
  if (group_of(last) != current->group->index) return is_ordered(last, space) ? 0 : READ_BY_MANY;
  if (readers == READ_BY_MANY) return readers;
  if (before_group_barrier(last, space)) return 0;
  if (!same_simdgroup(last)) return READ_BY_GROUP;
  if (readers == READ_BY_GROUP) return readers;
  if (before_simd_barrier(last, space)) return 0;
  return thread_of(last) == current->thread ? readers : READ_BY_SIMD;
}

static bool write_races_reader(Access last, uint8_t readers, enum Space space) {
  switch (readers) {
    case 0: return !is_ordered(last, space);
    case READ_BY_SIMD: return !before_group_barrier(last, space) && !before_simd_barrier(last, space);
    case READ_BY_GROUP: return !before_group_barrier(last, space);
    default: return true;
  }
}

/* ---- one access to device or threadgroup memory --------------------------- */

typedef struct {
  Cells *cells;
  const char *name;
  enum Space space;
  uint64_t offset;
  uintptr_t pc;
} Place;

static const char *space_name(enum Space space) { return space == DEVICE ? "device" : "threadgroup"; }

static void describe_other(char *text, size_t size, const Place *at, uint64_t byte, Access other) {
  if (group_of(other) == current->group->index)
    snprintf(text, size, "%s '%s' byte %lu, no order with thread %u of this threadgroup", space_name(at->space),
             at->name, (unsigned long)byte, thread_of(other));
  else
    snprintf(text, size, "%s '%s' byte %lu, no order with thread %u of threadgroup #%u", space_name(at->space),
             at->name, (unsigned long)byte, thread_of(other), group_of(other));
}

static void report_race(const char *kind, const Place *at, uint64_t byte, Access other) {
  char text[160];
  describe_other(text, sizeof text, at, byte, other);
  add_finding(kind, at->pc, "%s", text);
}

/* True where the last write, or another atomic write beside it, is not ordered before this access. */
static bool write_is_unordered(Access writer, uint8_t flags, enum Space space) {
  if (!writer) return false;
  if (flags & ATOMIC_BY_MANY) return !current->group->acquired.count;
  if (flags & ATOMIC_BY_GROUP) return !before_group_barrier(writer, space);
  return !is_ordered(writer, space);
}

/* Copies of whole objects may hold padding: for them what was never written shows where it is used. */
static uint8_t *check_read(const Place *at, uint64_t size, bool is_copy) {
  Access now = make_access();
  Cells *cells = at->cells;
  bool raced = false;
  for (uint64_t i = at->offset; i < at->offset + size; i++) {
    if (!raced && write_is_unordered(cells->writer[i], cells->flags[i], at->space)) {
      report_race("race-read-after-write", at, i, cells->writer[i]);
      raced = true;
    }
    uint8_t readers = cells->reader[i] ? widen_readers(cells->reader[i], cells->flags[i] & READERS, at->space) : 0;
    cells->flags[i] = (uint8_t)((cells->flags[i] & ~READERS) | readers | WAS_READ);
    cells->reader[i] = now;
  }
  if (is_copy) return cells->shadow + at->offset;
  for (uint64_t i = at->offset; i < at->offset + size; i++) {
    if (!cells->shadow[i]) continue;
    add_finding(at->space == DEVICE ? "uninitialised-device" : "uninitialised-threadgroup", at->pc,
                "'%s' byte %lu was never written", at->name, (unsigned long)i);
    break;
  }
  return clean_shadow;
}

/* A write over another write is judged once the new value is there: the same value is benign. */
static void note_overlap(const Place *at, uint64_t byte, Access other) {
  current->store.overlaps = true;
  describe_other(current->store.text, sizeof current->store.text, at, byte, other);
}

static void check_write(const Place *at, uint64_t size) {
  Access now = make_access();
  Cells *cells = at->cells;
  for (uint64_t i = at->offset; i < at->offset + size; i++) {
    Access writer = cells->writer[i], reader = cells->reader[i];
    if (!current->store.overlaps && write_is_unordered(writer, cells->flags[i], at->space))
      note_overlap(at, i, writer);
    if (reader && write_races_reader(reader, cells->flags[i] & READERS, at->space))
      report_race("race-write-after-read", at, i, reader);
    cells->writer[i] = now;
    cells->reader[i] = 0;
    cells->flags[i] = (uint8_t)((cells->flags[i] & ~(READERS | ATOMIC_WRITERS)) | WAS_WRITTEN);
  }
}

/* Atomic accesses do not race with each other, but with plain ones. */
static void check_atomic_cell(const Place *at, uint64_t i, bool writes) {
  Cells *cells = at->cells;
  Access writer = cells->writer[i], reader = cells->reader[i];
  uint8_t flags = cells->flags[i];
  bool ordered = !writer || is_ordered(writer, at->space);
  if (!ordered && !(flags & ATOMIC))
    report_race(writes ? "race-write-write" : "race-read-after-write", at, i, writer);
  if (writes && reader && write_races_reader(reader, flags & READERS, at->space))
    report_race("race-write-after-read", at, i, reader);
  if (!writes) return;
  uint8_t others = ordered ? 0 : group_of(writer) == current->group->index ? ATOMIC_BY_GROUP : ATOMIC_BY_MANY;
  if (!ordered) others |= flags & ATOMIC_BY_MANY;
  cells->flags[i] = (uint8_t)((flags & ~(READERS | ATOMIC_WRITERS)) | WAS_WRITTEN | ATOMIC | others);
  cells->writer[i] = make_access();
  cells->reader[i] = 0;
}

static void check_stored_value(PendingStore *store) {
  for (uint32_t i = 0; i < store->size; i++) {
    if (!store->shadow[i]) continue;
    add_finding("uninitialised-private", store->pc, "stores a value computed from an uninitialised variable");
    memset(store->shadow, 0, store->size);
    return;
  }
}

/* Look at what the previous store of the current thread has stored. */
void check_pending_store(void) {
  PendingStore *store = &current->store;
  if (!store->size) return;
  check_stored_value(store);
  if (store->overlaps) {
    bool same = store->size <= sizeof store->before && !memcmp(store->before, store->address, store->size);
    add_finding(same ? "same-value-write" : "race-write-write", store->pc, "%s", store->text);
  }
  store->size = 0;
  store->overlaps = false;
}

static void note_store(const Place *at, uint8_t *address, uint64_t size, bool is_copy) {
  PendingStore *store = &current->store;
  store->address = address;
  store->shadow = at->cells->shadow + at->offset;
  store->size = size <= sizeof store->before && !is_copy ? (uint32_t)size : 0;
  store->pc = at->pc;
  if (store->size) memcpy(store->before, address, store->size);
  if (store->overlaps && !store->size) add_finding("race-write-write", at->pc, "%s", store->text);
  if (!store->size) store->overlaps = false;
}

/* ---- whose memory is it --------------------------------------------------- */

/* The buffer whose window holds `address`, NULL if none does. */
Buffer *find_buffer(uintptr_t address) {
  uint64_t offset = address - (uintptr_t)launch.arena;
  if (offset >= launch.arena_size) return NULL;
  Buffer *buffer = &launch.buffers[offset >> WINDOW_BITS];
  return buffer->base ? buffer : NULL;
}

static bool is_outside(const Buffer *buffer, uint64_t offset, uint64_t size) {
  return offset > buffer->size || size > buffer->size - offset;
}

static const Slot *find_slot(uint64_t offset, uint64_t size) {
  const Group *group = current->group;
  for (uint32_t i = 0; i < group->slot_count; i++) {
    const Slot *slot = &group->slots[i];
    if (offset >= slot->offset && offset + size <= slot->offset + slot->size) return slot;
  }
  return NULL;
}

static bool in_group_memory(uintptr_t address) { return address - (uintptr_t)current->group->memory < GROUP_MEMORY; }

static bool in_own_stack(uintptr_t address) { return address - (uintptr_t)current->stack < STACK_BYTES; }

static bool in_stacks(uintptr_t address) {
  const Group *group = current->group;
  return address - (uintptr_t)group->stacks < (size_t)group->threads * STACK_BYTES;
}

static bool in_library(uintptr_t address) { return address >= launch.library_base && address < launch.library_end; }

/* Shadow of private memory, or a block of zeros that may be written to. */
uint8_t *find_shadow(uintptr_t address, uint64_t size) {
  (void)size;
  const Group *group = current->group;
  if (in_stacks(address)) return group->stack_shadow + (address - (uintptr_t)group->stacks);
  return ignored_shadow;
}

static const Buffer *nearest_buffer(uintptr_t address) {
  const Buffer *best = NULL;
  uintptr_t best_distance = UINTPTR_MAX;
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    const Buffer *buffer = &launch.buffers[i];
    if (!buffer->base) continue;
    uintptr_t base = (uintptr_t)buffer->base, end = base + buffer->size;
    uintptr_t distance = address < base ? base - address : address >= end ? address - end : 0;
    if (distance >= best_distance) continue;
    best_distance = distance;
    best = buffer;
  }
  return best;
}

static void device_out_of_bounds(uintptr_t address, uint64_t size, bool is_write, uintptr_t pc) {
  const Buffer *buffer = nearest_buffer(address);
  if (address < ARENA_PAGE)
    add_finding("device-out-of-bounds", pc, "%s through a null pointer (a buffer that was not passed?)",
                is_write ? "writes" : "reads");
  else if (buffer)
    add_finding("device-out-of-bounds", pc, "%s %lu bytes at byte %ld of '%s', which has %lu",
                is_write ? "writes" : "reads", (unsigned long)size, (long)(address - (uintptr_t)buffer->base),
                buffer->name, (unsigned long)buffer->size);
  else
    add_finding("device-out-of-bounds", pc, "%s address %p", is_write ? "writes" : "reads", (void *)address);
  fiber_abort();
}

static void threadgroup_out_of_bounds(uint64_t offset, uint64_t size, bool is_write, uintptr_t pc) {
  const Slot *best = NULL;
  for (uint32_t i = 0; i < current->group->slot_count; i++) {
    const Slot *slot = &current->group->slots[i];
    if (slot->offset <= offset && (!best || slot->offset > best->offset)) best = slot;
  }
  add_finding("threadgroup-out-of-bounds", pc, "%s %lu bytes at byte %ld of '%s', which has %lu",
              is_write ? "writes" : "reads", (unsigned long)size, best ? (long)(offset - best->offset) : -1L,
              best ? best->name : "", best ? (unsigned long)best->size : 0ul);
  fiber_abort();
}

/* ---- the answer to the instrumentation ------------------------------------ */

static inline void mark_read(uint8_t *flags, uint64_t size) {
  for (uint64_t i = 0; i < size; i++) flags[i] = WAS_READ;
}

static uint8_t *check_buffer(Buffer *buffer, uintptr_t address, uint64_t size, bool is_write, uintptr_t pc,
                             bool is_copy) {
  uint64_t offset = address - (uintptr_t)buffer->base;
  if (is_outside(buffer, offset, size)) device_out_of_bounds(address, size, is_write, pc);
  *(is_write ? &buffer->bytes_written : &buffer->bytes_read) += size;
  if (!buffer->writable) {
    if (is_write) add_finding("write-to-input", pc, "'%s' is an input", buffer->name);
    mark_read(buffer->cells.flags + offset, size);
    return is_write ? ignored_shadow : clean_shadow;
  }
  Place at = {&buffer->cells, buffer->name, DEVICE, offset, pc};
  if (!is_write) return check_read(&at, size, is_copy);
  check_write(&at, size);
  note_store(&at, (uint8_t *)address, size, is_copy);
  return buffer->cells.shadow + offset;
}

static uint8_t *check_group_memory(uintptr_t address, uint64_t size, bool is_write, uintptr_t pc, bool is_copy) {
  uint64_t offset = address - (uintptr_t)current->group->memory;
  const Slot *slot = find_slot(offset, size);
  if (!slot) threadgroup_out_of_bounds(offset, size, is_write, pc);
  Place at = {&current->group->cells, slot->name, THREADGROUP, offset, pc};
  if (!is_write) return check_read(&at, size, is_copy);
  check_write(&at, size);
  note_store(&at, (uint8_t *)address, size, is_copy);
  return current->group->cells.shadow + offset;
}

/* Check one access and return the shadow that belongs to it. */
static uint8_t *check_access(uintptr_t address, uint64_t size, bool is_write, uintptr_t pc, bool is_copy) {
  if (!current || size > NO_SHADOW) return is_write ? ignored_shadow : clean_shadow;
  if (current->store.size) check_pending_store();
  current->pc = pc;
  if (in_own_stack(address)) return current->stack_shadow + (address - (uintptr_t)current->stack);
  Buffer *buffer = find_buffer(address);
  if (buffer) return check_buffer(buffer, address, size, is_write, pc, is_copy);
  if (in_group_memory(address)) return check_group_memory(address, size, is_write, pc, is_copy);
  if (in_library(address)) return is_write ? ignored_shadow : clean_shadow;
  if (in_stacks(address)) {
    add_finding("private-out-of-bounds", pc, "private memory of another thread");
    fiber_abort();
  }
  device_out_of_bounds(address, size, is_write, pc);
  return clean_shadow;
}

static void check_atomic_place(const Place *at, uint32_t size, bool reads, bool writes) {
  bool uninitialised = false;
  for (uint64_t i = at->offset; i < at->offset + size; i++) {
    uninitialised |= at->cells->shadow[i] != 0;
    if (reads) at->cells->flags[i] |= WAS_READ;
    check_atomic_cell(at, i, writes);
    if (writes) at->cells->shadow[i] = 0;
  }
  if (reads && uninitialised)
    add_finding(at->space == DEVICE ? "uninitialised-device" : "uninitialised-threadgroup", at->pc,
                "atomic variable in '%s'", at->name);
}

/* One atomic operation on device or threadgroup memory. */
void check_atomic(uintptr_t address, uint32_t size, bool reads, bool writes, uintptr_t pc) {
  Buffer *buffer = find_buffer(address);
  uint64_t offset = buffer ? address - (uintptr_t)buffer->base : address - (uintptr_t)current->group->memory;
  if (!buffer) {
    const Slot *slot = in_group_memory(address) ? find_slot(offset, size) : NULL;
    if (!slot && in_group_memory(address)) threadgroup_out_of_bounds(offset, size, writes, pc);
    if (!slot) device_out_of_bounds(address, size, writes, pc);
    Place at = {&current->group->cells, slot->name, THREADGROUP, offset, pc};
    check_atomic_place(&at, size, reads, writes);
    return;
  }
  if (is_outside(buffer, offset, size)) device_out_of_bounds(address, size, writes, pc);
  if (reads) buffer->bytes_read += size;
  if (writes) buffer->bytes_written += size;
  if (writes && !buffer->writable) add_finding("write-to-input", pc, "'%s' is an input", buffer->name);
  if (!buffer->writable) return;
  Place at = {&buffer->cells, buffer->name, DEVICE, offset, pc};
  check_atomic_place(&at, size, reads, writes);
}

/* The two common cases, private memory and reading an input, without the rest. */
static inline uint8_t *quick_shadow(uintptr_t address, uint64_t size, bool is_write, uintptr_t pc) {
  if (!current || current->store.size) return NULL;
  current->pc = pc;
  if (in_own_stack(address)) {
    /* The runtime's own frames are all that lies below the frame of the kernel. */
    if (address < (uintptr_t)__builtin_frame_address(0))
      add_finding("private-out-of-bounds", pc, "a variable of a function that has returned");
    return current->stack_shadow + (address - (uintptr_t)current->stack);
  }
  if (is_write || size > 16) return NULL;
  Buffer *buffer = find_buffer(address);
  if (!buffer || buffer->writable) return NULL;
  uint64_t offset = address - (uintptr_t)buffer->base;
  if (is_outside(buffer, offset, size)) return NULL;
  buffer->bytes_read += size;
  mark_read(buffer->cells.flags + offset, size);
  return clean_shadow;
}

static inline MetadataPointers metadata(uintptr_t address, uint64_t size, bool is_write, uintptr_t pc) {
  uint8_t *quick = quick_shadow(address, size, is_write, pc);
  if (quick) return (MetadataPointers){quick, ignored_origin};
  uint8_t *shadow = check_access(address, size, is_write, pc, false);
  if (shadow == ignored_shadow) memset(ignored_shadow, 0, size < NO_SHADOW ? size : NO_SHADOW);
  return (MetadataPointers){shadow, ignored_origin};
}

#define METADATA(size)                                                           \
  MetadataPointers __msan_metadata_ptr_for_load_##size(uintptr_t address) {      \
    return metadata(address, size, false, CALLER);                               \
  }                                                                              \
  MetadataPointers __msan_metadata_ptr_for_store_##size(uintptr_t address) {     \
    return metadata(address, size, true, CALLER);                                \
  }
METADATA(1)
METADATA(2)
METADATA(4)
METADATA(8)

MetadataPointers __msan_metadata_ptr_for_load_n(uintptr_t address, uint64_t size) {
  return metadata(address, size, false, CALLER);
}
MetadataPointers __msan_metadata_ptr_for_store_n(uintptr_t address, uint64_t size) {
  return metadata(address, size, true, CALLER);
}

MsanContext *__msan_get_context_state(void) {
  static MsanContext outside;
  return current ? &current->msan : &outside;
}

/* An uninitialised value decides a branch or an address, or is passed to a function. */
void __msan_warning(uint32_t origin) {
  (void)origin;
  if (current) add_finding("uninitialised-private", CALLER, "uses a value computed from an uninitialised variable");
}

void __msan_poison_alloca(uintptr_t address, uint64_t size, const char *name) {
  (void)name;
  if (current && in_own_stack(address)) memset(find_shadow(address, size), 0xff, size);
}
void __msan_unpoison_alloca(uintptr_t address, uint64_t size) {
  if (current && in_own_stack(address)) memset(find_shadow(address, size), 0, size);
}
uint32_t __msan_chain_origin(uint32_t origin) { return origin; }
void __msan_instrument_asm_store(uintptr_t address, uint64_t size) { (void)address, (void)size; }

static void copy_shadow(void *to, const void *from, size_t size, uintptr_t pc) {
  if (!size) return;
  const uint8_t *source = check_access((uintptr_t)from, size, false, pc, true);
  uint8_t *target = check_access((uintptr_t)to, size, true, pc, true);
  memmove(target, source, size < NO_SHADOW ? size : NO_SHADOW);
}

void *__msan_memcpy(void *to, const void *from, size_t size) {
  copy_shadow(to, from, size, CALLER);
  return memmove(to, from, size);
}
void *__msan_memmove(void *to, const void *from, size_t size) {
  copy_shadow(to, from, size, CALLER);
  return memmove(to, from, size);
}
void *__msan_memset(void *to, int value, size_t size) {
  if (size) memset(check_access((uintptr_t)to, size, true, CALLER, true), 0, size < NO_SHADOW ? size : NO_SHADOW);
  return memset(to, value, size);
}

/* ---- undefined behaviour the compiler itself points at -------------------- */

typedef struct {
  const char *file;
  uint32_t line, column;
} SourceLocation;

typedef struct {
  uint16_t kind, info;
  char name[];
} TypeDescriptor;

static void add_located(const char *kind, const SourceLocation *at, uintptr_t pc, const char *text, uint64_t value) {
  uint32_t before = launch.finding_count;
  if (!current) return;
  add_finding(kind, pc, "%s %ld", text, (long)value);
  if (launch.finding_count == before) return;
  Finding *finding = last_finding();
  snprintf(finding->file, sizeof finding->file, "%s", at->file ? at->file : "");
  finding->line = at->line;
}

/* Index beyond an array of known size, in any address space. */
void __ubsan_handle_out_of_bounds(const SourceLocation *at, uint64_t index) {
  add_located("array-index", at, CALLER, "array index out of range:", index);
}

typedef struct {
  SourceLocation at;
  const TypeDescriptor *type;
  uint8_t log_alignment, check_kind;
} TypeMismatch;

/* An address that does not have the alignment of its type. */
void __ubsan_handle_type_mismatch_v1(const TypeMismatch *data, uint64_t address) {
  char text[96];
  snprintf(text, sizeof text, "%.40s needs %d-byte alignment; address modulo that:", data->type->name,
           1 << data->log_alignment);
  add_located("misaligned", &data->at, CALLER, text, address & ((1ull << data->log_alignment) - 1));
}

void __ubsan_handle_divrem_overflow(const SourceLocation *at, uint64_t left, uint64_t right) {
  (void)right;
  add_located("division-by-zero", at, CALLER, "integer division of", left);
  fiber_abort();
}

/* ---- after the launch ------------------------------------------------------ */

void count_unique_bytes(void) {
  for (uint32_t i = 0; i < launch.buffer_count; i++) {
    Buffer *buffer = &launch.buffers[i];
    for (uint64_t byte = 0; buffer->cells.flags && byte < buffer->size; byte++) {
      buffer->unique_read += (buffer->cells.flags[byte] & WAS_READ) != 0;
      buffer->unique_written += (buffer->cells.flags[byte] & WAS_WRITTEN) != 0;
    }
  }
}
