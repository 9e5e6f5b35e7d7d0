/* Signals of a running kernel: wild addresses, traps, and kernels that never end. */
#define _GNU_SOURCE
#include "runtime.h"

#include <signal.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

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
  if (!fiber_is_running) {
    if (number == SIGPROF) return; /* comes again */
    signal(number, SIG_DFL); /* not the kernel's doing: let it happen again */
    return;
  }
  uint32_t before = launch.finding_count;
  const Buffer *buffer;
  uintptr_t pc = interrupted_pc(context) + 1; /* findings hold return addresses */
  if (number == SIGPROF)
    add_finding("time-limit", pc, "still running after the time limit");
  else if (number == SIGFPE)
    add_finding("division-by-zero", pc, "integer division");
  else if (number == SIGILL)
    add_finding("private-out-of-bounds", pc, "beyond a private array (or other code the compiler holds impossible)");
  else if ((buffer = find_buffer((uintptr_t)info->si_addr)))
    add_finding("device-out-of-bounds", pc, "access at byte %ld of '%s', which has %lu",
                (long)((uintptr_t)info->si_addr - (uintptr_t)buffer->base), buffer->name, (unsigned long)buffer->size);
  else
    add_finding("wild-address", pc, "access to address %p", info->si_addr);
  if (launch.finding_count > before) {
    uint64_t outer = calling_pc(context), waits = current->pc - launch.library_base;
    last_finding()->outer_pc = outer ? outer : current->pc ? waits : 0;
  }
  fiber_abort();
}

/* From now until release_signals, signals of this thread belong to the kernel; `seconds` of processor time. */
void catch_signals(double seconds) {
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

void release_signals(void) {
  timer_delete(limit_timer);
  for (int i = 0; i < CAUGHT; i++) sigaction(caught_signals[i], &kept_actions[i], NULL);
  if (!(kept_stack.ss_flags & SS_DISABLE)) sigaltstack(&kept_stack, NULL);
  else sigaltstack(&(stack_t){.ss_flags = SS_DISABLE}, NULL);
  unmap_memory(signal_stack, STACK_BYTES);
}
