// sync.cpp - barriers of a block and exchanges within a warp.
#include "runtime.hpp"

namespace emulated {

static void release(Block* block, Barrier& barrier) {
  for (int w = 0; w < block->n_warps; w++) {
    wake_lanes(block->worker, &block->warps[w], barrier.waiting[w]);
    barrier.waiting[w] = 0;
  }
  barrier.arrived = 0;
}

// Counts this thread in; true when it was the last one.
static bool arrive(Fiber* fiber, int id, int n_threads, Here here) {
  Block* block = fiber->block;
  if (id < 0 || id > 15) fail(here, "barrier %d: there are 16, 0 to 15", id);
  const bool whole = n_threads == 0;
  if (whole) n_threads = block->n_threads;
  if (n_threads > block->n_threads || n_threads < 1 || (!whole && n_threads % 32 != 0))
    fail(here, "barrier %d for %d threads: needs a multiple of 32, at most the block's %d", id, n_threads,
         block->n_threads);
  Barrier& barrier = block->barriers[id];
  if (barrier.arrived == 0) {
    barrier.expected = n_threads;
    barrier.where = here;
  } else if (barrier.expected != n_threads) {
    fail(here, "barrier %d is waited for with %d threads here and with %d at %s(%d)", id, n_threads,
         barrier.expected, barrier.where.file, barrier.where.line);
  } else if (whole && id == 0 && barrier.where.line != here.line) {
    fail(here, "one part of the block is at this block_sync, another at %s(%d)", barrier.where.file,
         barrier.where.line);
  }
  fiber->counters->barriers++;
  return ++barrier.arrived == barrier.expected;
}

void barrier_sync(int id, int n_threads, Here here) {
  Fiber* fiber = current();
  if (arrive(fiber, id, n_threads, here)) {
    release(fiber->block, fiber->block->barriers[id]);
    trace_step(fiber->block);
    return;
  }
  fiber->block->barriers[id].waiting[fiber->linear / 32] |= 1u << fiber->lane;
  fiber->wait_a = id;
  suspend(Wait::barrier, here);
}

void barrier_arrive(int id, int n_threads, Here here) {
  Fiber* fiber = current();
  if (arrive(fiber, id, n_threads, here)) release(fiber->block, fiber->block->barriers[id]);
}

// ---- warps

void finish_exchange(Warp* warp) {
  u8* slots = warp->slots[warp->generation & 1];
  for (int lane = 0; lane < 32; lane++)
    if (!(warp->arrived >> lane & 1)) memset(slots + lane * slot_bytes, 0xff, slot_bytes);
  if (warp->together) warp->together(slots);
  const u32 waiting = warp->arrived & warp->live;
  warp->arrived = 0;
  warp->generation++;
  wake_lanes(current()->worker, warp, waiting & ~(current()->warp == warp ? 1u << current()->lane : 0));
}

const u8* warp_exchange(const char* name, const void* mine, u32 n_bytes, void (*together)(u8* slots),
                        Here here) {
  Fiber* fiber = current();
  Warp* warp = fiber->warp;
  if (warp->arrived == 0) {
    warp->name = name;
    warp->where = here;
    warp->together = together;
  } else if (warp->where.line != here.line || strcmp(warp->name, name) != 0) {
    fail(here, "the lanes of a warp have parted: this one is at %s, another at %s, %s(%d)", name, warp->name,
         warp->where.file, warp->where.line);
  }
  u8* slots = warp->slots[warp->generation & 1];
  memcpy(slots + fiber->lane * slot_bytes, mine, n_bytes);
  warp->arrived |= 1u << fiber->lane;
  if ((warp->arrived & warp->live) == warp->live)
    finish_exchange(warp);
  else
    suspend(Wait::warp, here);
  return slots;
}

void lane_left(Fiber* fiber) {   // lanes that have left are not waited for, as on the device
  Warp* warp = fiber->warp;
  warp->live &= ~(1u << fiber->lane);
  if (warp->arrived != 0 && (warp->arrived & warp->live) == warp->live) finish_exchange(warp);
}

}   // namespace emulated
