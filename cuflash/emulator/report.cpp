// report.cpp - errors: every one ends the launch with a message that names kernel, block, thread and source
// line.
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>

#include <map>

#include "runtime.hpp"

namespace emulated {

static std::string format_text(const char* format, ...) __attribute__((format(printf, 1, 2)));
static std::string format_text(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

std::string describe(const Fiber* fiber, Here here, const std::string& message) {
  const Index3 b = fiber->block_index, t = fiber->thread_index;
  return std::string(fiber->worker->launch->request.kernel) + ": " + message +
         format_text("\n  at %s(%d), block (%u, %u, %u), thread (%u, %u, %u)", here.file ? here.file : "?",
                     here.line, b.x, b.y, b.z, t.x, t.y, t.z);
}

void fail_team(Worker* worker, const std::string& message) {
  Launch* launch = worker->launch;
  {
    std::lock_guard<std::mutex> lock(launch->guard);
    if (launch->error.empty()) launch->error = message;
  }
  go_home(worker, home_failed);
}

void fail(Here here, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fail_team(current()->worker, describe(current(), here, text));
}

// ---- bad accesses

const Buffer* find_buffer(const void* address) {
  const Request& request = current()->worker->launch->request;
  const Buffer* found = nullptr;
  for (i64 i = 0; i < request.n_buffers;
       i++) {   // an array's own first element names it, even where arrays overlap
    const Buffer& buffer = request.buffers[i];
    if (buffer.data == address) return &buffer;
    const u8* p = static_cast<const u8*>(address);
    if (p >= buffer.low && p < buffer.high && (!found || buffer.high - buffer.low > found->high - found->low))
      found = &buffer;
  }
  return found;
}

void bad_global(const Buffer* buffer, const void* address, u64 n_bytes, u64 alignment, Here here) {
  if (buffer == nullptr)
    fail(here, "global access of %llu bytes through a pointer to none of the arrays passed in (address %p)",
         n_bytes, address);
  const i64 offset = static_cast<const u8*>(address) - buffer->low;
  const i64 size = buffer->high - buffer->low;
  if (offset < 0 || offset + static_cast<i64>(n_bytes) > size)
    fail(here, "global access outside %s: bytes %lld to %lld of %lld", buffer->name, offset,
         offset + static_cast<i64>(n_bytes), size);
  fail(here, "misaligned global access in %s: %llu bytes at byte %lld, address %p is no multiple of %llu",
       buffer->name, n_bytes, offset, address, alignment);
}

void bad_shared(i64 row, i64 col, i64 rows, i64 cols, u64 n_items, const void* address, u64 alignment,
                Here here) {
  if (row < 0 || row >= rows || col < 0 || col + static_cast<i64>(n_items) > cols)
    fail(here, "shared access outside [%lld][%lld]: row %lld, columns %lld to %lld", rows, cols, row, col,
         col + static_cast<i64>(n_items));
  fail(here,
       "misaligned shared access: row %lld, column %lld of [%lld][%lld], address %p is no multiple of %llu",
       row, col, rows, cols, address, alignment);
}

void* shared_memory(u64 n_bytes) {
  if (n_bytes > self->shared_bytes)
    fail({"SHARED_MEMORY", 0}, "needs %llu bytes of dynamic shared memory, the launch gives %u", n_bytes,
         self->shared_bytes);
  return self->shared;
}

u8* shared_pointer(u32 address, u32 n_bytes, u32 alignment, Here here) {
  const u32 offset = address - shared_window;
  if (address < shared_window || offset + n_bytes > self->shared_bytes)
    fail(here, "shared address %u (%u bytes) outside the block's %u bytes", address, n_bytes,
         self->shared_bytes);
  if (offset % alignment != 0)
    fail(here, "misaligned shared address %u: no multiple of %u", address, alignment);
  return self->shared + offset;
}

// ---- nobody can run

static std::string waiting_for(const Fiber* fiber) {
  if (fiber->finished) return "left the kernel";
  const Here at = fiber->where;
  const Barrier& barrier = fiber->block->barriers[fiber->wait_a & 15];
  switch (fiber->wait) {
    case Wait::barrier:
      return format_text("wait at barrier %llu, %s(%d): %d of %d threads came", fiber->wait_a, at.file,
                         at.line, barrier.arrived, barrier.expected);
    case Wait::warp:
      return format_text("wait for their warp at %s, %s(%d)", fiber->warp->name, at.file, at.line);
    case Wait::mbarrier:
      return format_text("wait for phase parity %llu of the mbarrier at shared address %llu, %s(%d)%s",
                         fiber->wait_b, fiber->wait_a, at.file, at.line,
                         describe_mbarrier(fiber->block, fiber->wait_a).c_str());
    case Wait::cluster: return format_text("wait at the cluster barrier, %s(%d)", at.file, at.line);
    case Wait::products:
      return format_text("wait for wgmma that not all of the warpgroup issued, %s(%d)", at.file, at.line);
    case Wait::registers:
      return format_text("wait for %llu registers a thread, %s(%d)", fiber->wait_a, at.file, at.line);
    case Wait::spin: return format_text("spin at %s(%d)", at.file, at.line);
    case Wait::nothing: break;
  }
  return "are ready";
}

void report_deadlock(Worker* worker) {
  std::string message = std::string(worker->launch->request.kernel) + ": deadlock, no thread can go on";
  for (int b = 0; b < worker->n_blocks; b++) {
    const Block* block = worker->blocks[b];
    message += format_text("\n  block (%u, %u, %u)", block->index.x, block->index.y, block->index.z);
    int lines = 0;
    for (int i = 0; i < block->n_threads && lines < 12; lines++) {
      const std::string what = waiting_for(block->fibers[i]);
      int end = i + 1;
      while (end < block->n_threads && waiting_for(block->fibers[end]) == what) end++;
      message +=
          format_text(end - i == 1 ? "\n    thread %d: " : "\n    threads %d to %d: ", i, end - 1) + what;
      i = end;
    }
  }
  fail_team(worker, message);
}

// ---- signals: a fault in a kernel, or a worker that must be stopped

static __thread Worker* signalled_worker = nullptr;
static struct sigaction old_actions[4];
static const int caught[4] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static std::mutex signal_guard;
static int signal_users = 0;

static void on_signal(int number, siginfo_t* info, void* context) {
  Worker* worker = signalled_worker;
  if (worker != nullptr && self == nullptr && info->si_code <= 0)
    return;                                     // sent by watch() or stop, but between two blocks
  if (worker == nullptr || self == nullptr) {   // not ours: what was there before
    for (int i = 0; i < 4; i++) {
      if (caught[i] != number) continue;
      const struct sigaction& old = old_actions[i];
      if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(number, info, context);
      if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) return old.sa_handler(number);
      sigaction(number, &old, nullptr);   // the fault repeats, with its usual end
    }
    return;
  }
  Fiber* fiber = current();
  const u8* address = static_cast<const u8*>(info->si_addr);
  std::string what;
  if (worker->launch->stop.load()) {
    go_home(worker, home_stopped);
  } else if (worker->timed_out.load()) {
    what = format_text("a thread ran for %.0f s without reaching a barrier, or threads only spun",
                       worker->launch->request.stall_seconds);
  } else if (number == SIGFPE) {
    what = "integer division by zero";
  } else if (address >= fiber->stack - guard_bytes && address < fiber->stack) {
    what = format_text("stack overflow: a thread's local arrays and calls need more than %llu bytes",
                       stack_bytes);
  } else {
    what = format_text("fault %d at address %p: a pointer used without Global or Shared", number,
                       static_cast<const void*>(address));
  }
  fail_team(worker, describe(fiber, fiber->where, what) + " (its last wait)");
}

void catch_signals() {
  std::lock_guard<std::mutex> lock(signal_guard);
  if (signal_users++ > 0) return;
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; i++) sigaction(caught[i], &action, &old_actions[i]);
}

void release_signals() {
  std::lock_guard<std::mutex> lock(signal_guard);
  if (--signal_users > 0) return;
  for (int i = 0; i < 4; i++) sigaction(caught[i], &old_actions[i], nullptr);
}

void use_signal_stack(Worker* worker) {
  constexpr u64 n_bytes = 64 << 10;
  signalled_worker = worker;
  if (worker->signal_stack == nullptr) worker->signal_stack = new u8[n_bytes];
  stack_t stack = {};
  stack.ss_sp = worker->signal_stack;
  stack.ss_size = n_bytes;
  sigaltstack(&stack, nullptr);
}

}   // namespace emulated
