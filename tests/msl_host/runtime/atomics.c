/* Atomic operations, fences, and the order they create.
 *
 * Metal's atomics are relaxed: alone they order nothing. A store after a release
 * fence carries what the storing thread knows (a list of orders); a thread that
 * reads that value and then passes an acquire fence knows it too, and a barrier
 * hands it on to its threadgroup.
 */
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

static void order_list_add(OrderList *list, Order order) {
  if (list->count == list->capacity) {
    list->capacity = list->capacity ? 2 * list->capacity : 8;
    list->items = realloc(list->items, list->capacity * sizeof(Order));
  }
  list->items[list->count++] = order;
}

/* Add `order`, or widen an entry of the same thread and holder. */
static void order_list_merge(OrderList *list, Order order) {
  for (uint32_t i = 0; i < list->count; i++) {
    Order *item = &list->items[i];
    if (item->group != order.group || item->thread != order.thread || item->by_thread != order.by_thread) continue;
    if (item->at_time != order.at_time) continue;
    if (order.time > item->time) item->time = order.time;
    if (order.barrier_time > item->barrier_time) item->barrier_time = order.barrier_time;
    return;
  }
  order_list_add(list, order);
}

void order_list_free(OrderList *list) {
  free(list->items);
  *list = (OrderList){0};
}

/* What each atomic variable carries; a small table by address. */
typedef struct {
  uintptr_t address;
  OrderList orders;
} Message;
enum { MESSAGES = 4096 };
static Message messages[MESSAGES];
static bool messages_used;

static Message *find_message(uintptr_t address) {
  uintptr_t at = (address >> 2) * 2654435761u % MESSAGES;
  for (uint32_t i = 0; i < MESSAGES; i++, at = (at + 1) % MESSAGES)
    if (!messages[at].address || messages[at].address == address) return &messages[at];
  return NULL;
}

/* Forget all messages, at the end of a launch. */
void orders_clear(void) {
  for (uint32_t i = 0; messages_used && i < MESSAGES; i++) {
    order_list_free(&messages[i].orders);
    messages[i].address = 0;
  }
  messages_used = false;
}

/* True where the current thread itself acquired the order, or got it through a barrier since. */
static bool is_visible(const Order *order) {
  const Group *group = current->group;
  if (order->by_thread == current->thread) return true;
  if (order->at_time < group->barrier_time[DEVICE]) return true;
  return order->by_thread / SIMD_WIDTH == current->simd && order->at_time < group->simd_time[current->simd][DEVICE];
}

/* An acquired order that covers `access`, NULL if there is none. */
const Order *find_order(const OrderList *list, Access access, enum Space space) {
  uint32_t group = (uint32_t)(access >> 10 & 0x3fffff) - 1, thread = access & 0x3ff, time = (uint32_t)(access >> 32);
  if (space != DEVICE && group != current->group->index) return NULL;
  for (uint32_t i = 0; i < list->count; i++) {
    const Order *order = &list->items[i];
    if (order->group != group || !is_visible(order)) continue;
    if (time < order->barrier_time || (thread == order->thread && time <= order->time)) return order;
  }
  return NULL;
}

/* ---- fences --------------------------------------------------------------- */

enum MemoryOrder { RELAXED, ACQUIRE, RELEASE, ACQUIRE_RELEASE, SEQUENTIAL };

static void release(void) {
  Group *group = current->group;
  current->release.count = 0;
  Order own = {group->index, current->thread, launch.now, group->barrier_time[DEVICE], 0, 0};
  order_list_add(&current->release, own);
  for (uint32_t i = 0; i < group->acquired.count; i++) {
    if (!is_visible(&group->acquired.items[i])) continue;
    Order known = group->acquired.items[i];
    known.by_thread = known.at_time = 0;
    order_list_merge(&current->release, known);
  }
  launch.now++;
}

static void acquire(void) {
  for (uint32_t i = 0; i < current->pending.count; i++) {
    Order order = current->pending.items[i];
    order.by_thread = current->thread;
    order.at_time = launch.now;
    order_list_merge(&current->group->acquired, order);
  }
  current->pending.count = 0;
  launch.now++;
}

/* atomic_thread_fence: only fences of device memory and at least device scope order threadgroups. */
void msl_fence(uint32_t mem_flags, uint32_t order, uint32_t device_scope) {
  if (!(mem_flags & MEM_DEVICE) || !device_scope || order == RELAXED) return;
  if (order != RELEASE) acquire();
  if (order != ACQUIRE) release();
}

static void carry(uintptr_t address, bool is_store_only) {
  if (!current->release.count && !messages_used) return;
  Message *message = find_message(address);
  if (!message) return;
  messages_used = true;
  message->address = address;
  if (is_store_only) message->orders.count = 0;
  for (uint32_t i = 0; i < current->release.count; i++) order_list_merge(&message->orders, current->release.items[i]);
}

static void receive(uintptr_t address) {
  if (!messages_used) return;
  Message *message = find_message(address);
  if (!message || !message->address) return;
  for (uint32_t i = 0; i < message->orders.count; i++) order_list_merge(&current->pending, message->orders.items[i]);
}

/* ---- operations ------------------------------------------------------------ */

enum AtomicOp {
  ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_EXCHANGE, ATOMIC_ADD, ATOMIC_SUB, ATOMIC_AND, ATOMIC_OR,
  ATOMIC_XOR, ATOMIC_MIN, ATOMIC_MAX, ATOMIC_COMPARE_EXCHANGE,
};
enum AtomicType { ATOMIC_INT, ATOMIC_UINT, ATOMIC_FLOAT, ATOMIC_ULONG, ATOMIC_BYTE };

typedef union {
  uint64_t u64;
  uint32_t u32;
  int32_t i32;
  float f32;
  uint8_t u8;
} AtomicValue;

static const uint32_t atomic_size[] = {4, 4, 4, 8, 1};

static AtomicValue float_result(AtomicValue old, AtomicValue value, enum AtomicOp op) {
  AtomicValue result = {0};
  switch (op) {
    case ATOMIC_ADD: result.f32 = old.f32 + value.f32; break;
    case ATOMIC_SUB: result.f32 = old.f32 - value.f32; break;
    case ATOMIC_MIN: result.f32 = old.f32 < value.f32 ? old.f32 : value.f32; break;
    case ATOMIC_MAX: result.f32 = old.f32 > value.f32 ? old.f32 : value.f32; break;
    default: result = value;
  }
  return result;
}

static bool is_less(AtomicValue a, AtomicValue b, enum AtomicType type) {
  return type == ATOMIC_INT ? a.i32 < b.i32 : type == ATOMIC_ULONG ? a.u64 < b.u64 : a.u32 < b.u32;
}

static AtomicValue integer_result(AtomicValue old, AtomicValue value, enum AtomicOp op, enum AtomicType type) {
  switch (op) {
    case ATOMIC_ADD: return (AtomicValue){.u64 = old.u64 + value.u64};
    case ATOMIC_SUB: return (AtomicValue){.u64 = old.u64 - value.u64};
    case ATOMIC_AND: return (AtomicValue){.u64 = old.u64 & value.u64};
    case ATOMIC_OR: return (AtomicValue){.u64 = old.u64 | value.u64};
    case ATOMIC_XOR: return (AtomicValue){.u64 = old.u64 ^ value.u64};
    case ATOMIC_MIN: return is_less(old, value, type) ? old : value;
    case ATOMIC_MAX: return is_less(old, value, type) ? value : old;
    default: return value;
  }
}

static AtomicValue perform(void *address, enum AtomicOp op, enum AtomicType type, uint64_t bits, uint64_t expected) {
  AtomicValue old = {0}, value = {.u64 = bits}, result;
  uint32_t size = atomic_size[type];
  memcpy(&old, address, size);
  if (op == ATOMIC_LOAD) return old;
  if (op == ATOMIC_COMPARE_EXCHANGE && old.u64 != expected) return old;
  result = type == ATOMIC_FLOAT ? float_result(old, value, op) : integer_result(old, value, op, type);
  if (memcmp(address, &result, size)) launch.progress++;
  memcpy(address, &result, size);
  carry((uintptr_t)address, op == ATOMIC_STORE);
  return old;
}

/* One atomic operation; returns the old value's bits. Other threads may run before it. */
uint64_t msl_atomic(void *address, uint32_t op, uint32_t type, uint64_t bits, uint64_t expected, uint32_t order) {
  current->pc = CALLER;
  fiber_yield();
  launch.statistics.atomics++;
  if (order != RELAXED)
    add_finding("atomic-order", CALLER, "Metal's atomic operations take memory_order_relaxed only; use a fence");
  if (launch.checked) {
    check_pending_store();
    check_atomic((uintptr_t)address, atomic_size[type], op != ATOMIC_STORE, op != ATOMIC_LOAD, CALLER);
  }
  AtomicValue old = perform(address, op, type, bits, expected);
  if (op != ATOMIC_STORE) receive((uintptr_t)address);
  return old.u64;
}
