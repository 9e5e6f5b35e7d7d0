/* Shared declarations of the host executor's runtime.
 *
 * One fiber is one GPU thread. 32 fibers are a SIMD-group, all fibers of a
 * threadgroup share one block of threadgroup memory. The scheduler in
 * runtime.c runs fibers until they wait; check.c is called for every load and
 * store of an instrumented kernel; atomics.c holds atomic operations and the
 * order they create between threads.
 */
#ifndef MSL_HOST_RUNTIME_H
#define MSL_HOST_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  SIMD_WIDTH = 32,
  MAX_THREADS = 1024, /* threads in a threadgroup */
  MAX_SIMDGROUPS = MAX_THREADS / SIMD_WIDTH,
  MAX_BUFFERS = 64,
  MAX_SLOTS = 64,              /* threadgroup declarations reached by one launch */
  MAX_FINDINGS = 64,           /* distinct findings kept of one launch */
  STACK_BYTES = 256 * 1024,    /* private memory of one thread */
  GAP = 32768 + 64,            /* bytes between slots, so that an index past one array hits no other */
  GROUP_MEMORY = 4096 * 1024,  /* address space for threadgroup memory */
  GUARD = 65536,               /* bytes without access around stacks and threadgroup memory */
  GROUP_MEMORY_LIMIT = 32768,  /* what Metal allows, bytes */
  SPIN_ROUNDS = 20000,         /* scheduler rounds without progress before a spin is called endless */
};

/* The two address spaces whose order barriers control. */
enum Space { DEVICE = 0, THREADGROUP = 1, SPACES = 2 };

/* mem_flags of the Metal Shading Language. */
enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

/* Launch options; run.py uses the same values. */
enum Option {
  OPTION_RANDOM = 1,    /* random order of threadgroups, SIMD-groups and lanes */
  OPTION_FLUSH = 2,     /* denormal floats are flushed to zero */
  OPTION_LOCKSTEP = 4,  /* SIMD operations order memory inside the SIMD-group */
};

enum FiberState { RUNNABLE, AT_SIMD, AT_SIMD_BARRIER, AT_GROUP_BARRIER, FINISHED };

/* One access, packed: 32 bits of time, 22 of threadgroup + 1, 10 of thread. 0 = none. */
typedef uint64_t Access;

/* Bits of one byte's flags. The first three values say who else reads beside the last reader;
 * the last three that the last write was atomic, and who else wrote so without order. */
enum {
  READ_BY_SIMD = 1,
  READ_BY_GROUP = 2,
  READ_BY_MANY = 3,
  READERS = 3,
  WAS_READ = 4,
  WAS_WRITTEN = 8,
  ATOMIC = 16,
  ATOMIC_BY_GROUP = 32,
  ATOMIC_BY_MANY = 64,
  ATOMIC_WRITERS = 16 + 32 + 64,
};

/* What is known about each byte of one block of memory. */
typedef struct {
  uint8_t *shadow;  /* non-zero bits are uninitialised */
  Access *writer;   /* last write */
  Access *reader;   /* last read since that write */
  uint8_t *flags;
} Cells;

/* One buffer argument, as run.py passes it. */
typedef struct {
  void *host;  /* copied in before and, if writable, out after the launch */
  uint64_t size;
  const char *name;
  uint32_t writable, initialised;
  uint64_t bytes_read, bytes_written;   /* traffic; instrumented kernels only */
  uint64_t unique_read, unique_written; /* distinct bytes; instrumented kernels only */
  uint8_t *base; /* set by the launch, as is the rest */
  Cells cells;
} Buffer;

/* One `threadgroup` declaration of the kernel, placed in the arena of its group. */
typedef struct {
  uint32_t id;
  const char *name;
  uint64_t offset, size;
} Slot;

/* Everything before this point of (group, thread) is ordered before the holder. */
typedef struct {
  uint32_t group, thread;
  uint32_t time;          /* own accesses up to this time */
  uint32_t barrier_time;  /* accesses of the whole threadgroup before this time */
  uint32_t by_thread, at_time; /* who acquired it and when */
} Order;

typedef struct {
  Order *items;
  uint32_t count, capacity;
} OrderList;

typedef struct Group Group;
typedef struct Fiber Fiber;

/* Arguments of a SIMD operation; the runtime performs it once all lanes wait. */
typedef void (*SimdOperation)(Fiber **lanes, uint32_t active);

/* Layout fixed by clang's kernel-memory instrumentation. */
typedef struct {
  char param[800], retval[800], va_arg[800], va_arg_origin[800];
  uint64_t va_arg_overflow_size;
  char param_origin[800];
  uint32_t retval_origin;
} MsanContext;

/* A store whose value is looked at when the thread next enters the runtime. */
typedef struct {
  uint8_t *address, *shadow;
  uint32_t size;
  bool overlaps;   /* another thread wrote the same cell without order */
  uint8_t before[16];
  uintptr_t pc;
  char text[160];
} PendingStore;

struct Fiber {
  void *stack_pointer;
  enum FiberState state;
  Group *group;
  uint32_t thread, simd, lane;
  uint32_t position[3];
  uint8_t *stack, *stack_shadow;
  uintptr_t pc;        /* call site it waits at */
  uint32_t mem_flags;  /* of the barrier it waits at */
  uint64_t calls;      /* the calls that led to that barrier; checked kernels only */
  uint32_t barriers;   /* threadgroup barriers passed */
  SimdOperation operation;
  void *arguments;
  OrderList pending, release; /* atomics.c */
  PendingStore store;
  MsanContext msan;
};

struct Group {
  bool live;
  uint32_t index;  /* linear position in the grid */
  uint32_t position[3], size[3];
  uint32_t threads, simdgroups;
  uint32_t barrier_time[SPACES];
  uint32_t simd_time[MAX_SIMDGROUPS][SPACES];
  Fiber *fibers;
  uint8_t *stacks, *stack_shadow;
  uint8_t *memory;
  Cells cells;
  Slot slots[MAX_SLOTS];
  uint32_t slot_count;
  uint64_t memory_used; /* bytes laid out */
  OrderList acquired;
};

/* One finding, as run.py reads it. */
typedef struct {
  char kind[32];
  char text[224];
  uint64_t pc;       /* offset in the kernel's library; 0 if none */
  uint64_t outer_pc; /* where it was called from, for findings of signals */
  char file[160];  /* set only where the instrumentation names the line itself */
  uint32_t line;
  uint32_t group[3];
  uint32_t thread, simd, lane;
} Finding;

typedef struct {
  uint64_t switches, simd_operations, divergent_operations, threadgroup_barriers, simdgroup_barriers;
  uint64_t atomics, threadgroup_bytes, threadgroups;
} Statistics;

/* State of the one launch in progress. */
typedef struct {
  bool checked, aborted;
  uint32_t options;
  Buffer *buffers;
  uint32_t buffer_count;
  const uint64_t *threadgroup_sizes;
  uint32_t threadgroup_size_count;
  uint32_t grid[3], threadgroup[3], groups[3];
  Group *resident;
  uint32_t resident_count;
  uint32_t groups_waiting; /* not started yet */
  uint32_t now;            /* logical time: advances at barriers and fences */
  uint64_t progress;       /* advances when a spin elsewhere could end */
  Finding findings[MAX_FINDINGS];
  uint32_t finding_count;
  Statistics statistics;
  uint8_t *arena; /* one window of addresses for each buffer */
  uint64_t arena_size;
  uint64_t library_base, library_end;
} Launch;

/* A buffer lies in the middle of its window: no index of 32 bits leads into another buffer. */
enum { WINDOW_BITS = 36, ARENA_PAGE = 65536 };

extern Launch launch;
extern Fiber *current;
extern bool fiber_is_running; /* false while the scheduler acts for `current` */

/* runtime.c */
void fiber_yield(void);
void fiber_abort(void) __attribute__((noreturn));
void add_finding(const char *kind, uintptr_t pc, const char *format, ...) __attribute__((format(printf, 3, 4)));
Finding *last_finding(void);
void *map_memory(size_t size);
void *map_guarded(size_t size);
void unmap_guarded(void *memory, size_t size);
void unmap_memory(void *memory, size_t size);

void simd_operation(SimdOperation operation, void *arguments, uintptr_t pc);

/* signals.c */
void catch_signals(double time_limit);
void release_signals(void);

/* check.c */
void cells_create_flags(Cells *cells, uint64_t size);
void cells_create(Cells *cells, uint64_t size, bool initialised);
void cells_destroy(Cells *cells, uint64_t size);
void cells_reset(Cells *cells, uint64_t from, uint64_t size);
void check_pending_store(void);
bool is_ordered(Access earlier, enum Space space);
Access make_access(void);
Buffer *find_buffer(uintptr_t address);
uint8_t *find_shadow(uintptr_t address, uint64_t size);
void check_atomic(uintptr_t address, uint32_t size, bool reads, bool writes, uintptr_t pc);
void count_unique_bytes(void);

/* atomics.c */
const Order *find_order(const OrderList *list, Access access, enum Space space);
void orders_clear(void);
void order_list_free(OrderList *list);

#define FOR_ACTIVE(lane, active) \
  for (uint32_t lane = 0; lane < SIMD_WIDTH; lane++) \
    if ((active) >> lane & 1)

#define CALLER ((uintptr_t)__builtin_return_address(0))

#endif
