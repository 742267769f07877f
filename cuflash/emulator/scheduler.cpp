// scheduler.cpp - fibers: who runs next, and how one gives the processor to another.
//
// A fiber starts through ucontext and is switched by setjmp/longjmp, which do not touch the signal mask (a
// switch is then no system call).  Fibers and their stacks live as long as their worker: at the end of a
// block a fiber waits in leave() and returns from it into the next block.
#include <sched.h>
#include <sys/mman.h>

#include "runtime.hpp"

namespace emulated {

__thread Thread* self __attribute__((tls_model("initial-exec"))) = nullptr;

[[noreturn]] void go_home(Worker* worker, int why) { _longjmp(worker->home, why); }

[[noreturn]] static void jump(Fiber* to) {
  self = to;
  if (to->started) _longjmp(to->context, 1);
  to->started = true;
  setcontext(&to->start);
  __builtin_trap();
}

static void switch_fibers(Fiber* from, Fiber* to) {
  if (_setjmp(from->context) == 0) jump(to);
}

// ---- the ready set: a mask of lanes per warp, and a mask of warps that have one

void wake_lanes(Worker* worker, Warp* warp, u32 lanes) {
  if (lanes == 0) return;
  warp->ready |= lanes;
  worker->ready[warp->position / 64] |= 1ull << (warp->position % 64);
}

void wake(Fiber* fiber) { wake_lanes(fiber->worker, fiber->warp, 1u << fiber->lane); }

static int first_ready(const Worker* worker, int from) {   // position >= from, else from 0; -1: none
  const int words = (worker->n_positions + 63) / 64;
  u64 mask = worker->ready[from / 64] >> (from % 64) << (from % 64);
  for (int i = 0, word = from / 64; i <= words; i++) {
    if (mask != 0) return 64 * word + __builtin_ctzll(mask);
    word = word + 1 == words ? 0 : word + 1;
    mask = worker->ready[word];
  }
  return -1;
}

// Three orders.  Seed 0: warps and lanes in order.  Odd seeds: positions are a random priority and the best
// ready warp always runs, so one warp gets as far ahead as the barriers let it.  Even seeds: any ready
// thread.
static Fiber* pick(Worker* worker) {
  const u64 seed = worker->launch->request.seed;
  const u64 dice = seed == 0 ? 0 : worker->random();
  const int from = seed == 0       ? worker->cursor
                   : seed % 2 == 1 ? 0
                                   : static_cast<int>(dice % worker->n_positions);
  const int position = first_ready(worker, from);
  if (position < 0) return nullptr;
  worker->cursor = position;
  Warp* warp = worker->by_position[position];
  const int turn = dice >> 32 & 31;
  const u32 turned = warp->ready >> turn | (turn ? warp->ready << (32 - turn) : 0);
  const int lane = (__builtin_ctz(turned) + turn) & 31;
  warp->ready &= ~(1u << lane);
  if (warp->ready == 0) worker->ready[position / 64] &= ~(1ull << (position % 64));
  return warp->lanes[lane];
}

static Fiber* next_fiber(Worker* worker) {
  if (worker->launch->stop.load(std::memory_order_relaxed)) go_home(worker, home_stopped);
  for (;;) {
    if (Fiber* fiber = pick(worker)) {
      if (fiber->wait != Wait::spin) worker->progress.fetch_add(1, std::memory_order_relaxed);
      return fiber;
    }
    if (advance_copies(worker)) continue;
    if (worker->paused.empty()) report_deadlock(worker);
    sched_yield();   // they wait for another block, which another OS thread may be running
    for (Fiber* fiber : worker->paused) wake(fiber);
    worker->paused.clear();
    return pick(worker);
  }
}

void suspend(Wait wait, Here here) {
  Fiber* fiber = current();
  fiber->wait = wait;
  fiber->where = here;
  Fiber* next = next_fiber(fiber->worker);
  if (next != fiber) switch_fibers(fiber, next);
  fiber->wait = Wait::nothing;
}

void pause(Here here) {
  Fiber* fiber = current();
  fiber->worker->paused.push_back(fiber);
  suspend(Wait::spin, here);
}

// ---- life of a fiber

static void leave(Fiber* fiber) {
  Worker* worker = fiber->worker;
  check_exit(fiber);
  fiber->finished = true;
  fiber->block->n_live--;
  worker->n_live--;
  lane_left(fiber);
  cluster_check(worker);
  if (_setjmp(fiber->context) != 0) return;   // into the next block
  if (worker->n_live == 0) go_home(worker, home_done);
  jump(next_fiber(worker));
}

static void fiber_main() {
  for (;;) {
    const Request& request = current()->worker->launch->request;
    request.entry(request.parameters);
    leave(current());
  }
}

static Fiber* new_fiber(Worker* worker) {
  Fiber* fiber = static_cast<Fiber*>(aligned_alloc(64, (sizeof(Fiber) + 63) / 64 * 64));
  memset(static_cast<void*>(fiber), 0, sizeof(Fiber));
  u8* memory = static_cast<u8*>(mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) return nullptr;
  mprotect(memory, guard_bytes, PROT_NONE);   // a stack overflow is a signal, and so a message
  fiber->stack = memory + guard_bytes;
  fiber->worker = worker;
  fiber->async = new FiberAsync;
  return fiber;
}

static void prepare(Fiber* fiber) {
  if (fiber->started) return;
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp = fiber->stack;
  fiber->start.uc_stack.ss_size = stack_bytes;
  fiber->start.uc_link = nullptr;
  makecontext(&fiber->start, fiber_main, 0);
}

// ---- a team: the blocks of one cluster, or one block

static void set_up_block(Worker* worker, Block* block, Fiber** fibers, u64 number) {
  const Request& request = worker->launch->request;
  const u32* grid = request.grid;
  const u32* size = request.block;
  block->worker = worker;
  block->index = {static_cast<u32>(number % grid[0]), static_cast<u32>(number / grid[0] % grid[1]),
                  static_cast<u32>(number / grid[0] / grid[1])};
  block->n_threads = block->n_live = static_cast<int>(size[0] * size[1] * size[2]);
  block->n_warps = (block->n_threads + 31) / 32;
  block->fibers = fibers;
  memset(block->shared, 0xff, request.shared_bytes);   // NaN in every float type
  memset(block->barriers, 0, sizeof block->barriers);
  block->step = 0;
  for (int w = 0; w < block->n_warps; w++) {
    Warp& warp = block->warps[w];
    warp.ready = warp.arrived = warp.generation = 0;
    const int lanes = block->n_threads - 32 * w;
    warp.live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
  }
  for (int i = 0; i < block->n_threads; i++) {
    Fiber* fiber = fibers[i];
    prepare(fiber);
    fiber->thread_index = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    fiber->block_index = block->index;
    fiber->block_size = {size[0], size[1], size[2]};
    fiber->grid_size = {grid[0], grid[1], grid[2]};
    fiber->linear = i;
    fiber->lane = i % 32;
    fiber->shared = block->shared;
    fiber->shared_bytes = request.shared_bytes;
    fiber->counters = &worker->counters;
    fiber->tracing = request.timeline != 0;
    fiber->hint_address = nullptr;
    fiber->block = block;
    fiber->warp = &block->warps[i / 32];
    fiber->warp->lanes[i % 32] = fiber;
    fiber->finished = false;
    fiber->wait = Wait::nothing;
  }
}

static void grow(Worker* worker, u64 n_fibers, u64 n_blocks) {
  while (worker->fibers.size() < n_fibers) worker->fibers.push_back(new_fiber(worker));
  while (worker->blocks.size() < n_blocks) {
    Block* block = static_cast<Block*>(aligned_alloc(64, (sizeof(Block) + 63) / 64 * 64));
    memset(static_cast<void*>(block), 0, sizeof(Block));
    block->shared = static_cast<u8*>(aligned_alloc(1024, largest_shared));
    block->async = new BlockAsync;
    block->async->view = static_cast<u8*>(aligned_alloc(1024, largest_shared));
    worker->blocks.push_back(block);
  }
}

// Runs one team; returns home_done, home_failed or home_stopped.
static int start_team(Worker* worker) {
  const int why = _setjmp(worker->home);
  if (why == 0) jump(next_fiber(worker));
  self = nullptr;
  return why;
}

void run_team(Worker* worker, u64 team) {
  const Request& request = worker->launch->request;
  const u64 n_threads = static_cast<u64>(request.block[0]) * request.block[1] * request.block[2];
  const int n_blocks = static_cast<int>(request.cluster);
  grow(worker, n_threads * n_blocks, n_blocks);
  worker->n_blocks = n_blocks;
  worker->n_positions = worker->n_live = worker->cursor = 0;
  worker->random_state = (request.seed + 1) * 0x9e3779b97f4a7c15ull ^ (team + 1) * 0xd1342543de82ef95ull;
  worker->paused.clear();
  memset(worker->ready, 0, sizeof worker->ready);
  for (int b = 0; b < n_blocks; b++) {
    Block* block = worker->blocks[b];
    block->rank = b;
    set_up_block(worker, block, worker->fibers.data() + b * n_threads, team * n_blocks + b);
    set_up_async(block);
    worker->n_live += block->n_threads;
    for (int w = 0; w < block->n_warps; w++) worker->by_position[worker->n_positions++] = &block->warps[w];
  }
  if (request.seed != 0)
    for (int i = worker->n_positions - 1; i > 0; i--)
      std::swap(worker->by_position[i], worker->by_position[worker->random() % (i + 1)]);
  for (int i = 0; i < worker->n_positions; i++) {
    worker->by_position[i]->position = i;
    wake_lanes(worker, worker->by_position[i], worker->by_position[i]->live);
  }
  const bool finished = start_team(worker) == home_done;
  if (!finished) {   // abandoned in the middle: such fibers begin anew
    for (Fiber* fiber : worker->fibers) fiber->started = false;
    worker->launch->stop = true;
  }
  drop_async(worker, finished);
}

}   // namespace emulated
