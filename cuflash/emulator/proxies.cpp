// proxies.cpp - mbarriers, the fence between ordinary accesses and the async proxy, clusters, setmaxnreg.
//
// The async proxy (what TMA stores and wgmma read) has its own view of shared memory.  Loads by TMA land in
// both.  An ordinary write reaches the view when its thread executes fence_async(): a missing fence leaves
// old bytes there.
#include <algorithm>

#include "runtime.hpp"

namespace emulated {

void set_up_async(Block* block) {
  BlockAsync& async = *block->async;
  if (block->worker->launch->request.async_proxy)
    memset(async.view, 0xff, block->worker->launch->request.shared_bytes);
  async.mbarriers.clear();
  async.free_registers = 0;
  set_up_products(block);
  const int n_threads = block->n_threads * static_cast<int>(block->worker->launch->request.blocks_per_sm);
  const int entry = min(65536 / n_threads / 8 * 8, 256);   // registers of a thread, by __launch_bounds__
  for (int i = 0; i < block->n_threads; i++) {
    FiberAsync& fiber = *block->fibers[i]->async;
    fiber.copies.clear();
    fiber.stores.clear();
    fiber.touched.clear();
    fiber.known.clear();
    fiber.product_groups.clear();
    fiber.copies_committed = fiber.stores_committed = fiber.products_issued = 0;
    fiber.product_fenced = fiber.cluster_arrived = false;
    fiber.registers = entry;
  }
}

void touched_shared(const void* address, u32 n_bytes) {
  Fiber* fiber = current();
  std::vector<Range>& touched = fiber->async->touched;
  const u32 offset = static_cast<u32>(static_cast<const u8*>(address) - fiber->shared);
  if (!touched.empty() && touched.back().offset + touched.back().n_bytes == offset) {
    touched.back().n_bytes += n_bytes;
    return;
  }
  touched.push_back({offset, n_bytes});
  if (touched.size() < 4096) return;
  std::sort(touched.begin(), touched.end(), [](Range a, Range b) { return a.offset < b.offset; });
  size_t n = 0;
  for (const Range& range : touched) {
    Range& last = touched[n == 0 ? 0 : n - 1];
    if (n != 0 && range.offset <= last.offset + last.n_bytes)
      last.n_bytes = max(last.n_bytes, range.offset + range.n_bytes - last.offset);
    else
      touched[n++] = range;
  }
  touched.resize(n);
}

void fence_async() {
  Fiber* fiber = current();
  u8* view = fiber->block->async->view;
  for (const Range& range : fiber->async->touched)
    memcpy(view + range.offset, fiber->shared + range.offset, range.n_bytes);
  fiber->async->touched.clear();
}

// ---- mbarriers: phase 1 bit, count 20, pending 20, bytes expected 23 (biased), in the 8 bytes they have on
// the device

struct Fields {
  u64 phase, count, pending;
  i64 bytes;
};
constexpr i64 bias = 1 << 22;

static Fields load_fields(Block* block, u32 offset) {
  u64 word;
  memcpy(&word, block->shared + offset, 8);
  return {word & 1, word >> 1 & 0xfffff, word >> 21 & 0xfffff, static_cast<i64>(word >> 41) - bias};
}

static void store_fields(Block* block, u32 offset, Fields f) {
  const u64 word = f.phase | f.count << 1 | f.pending << 21 | static_cast<u64>(f.bytes + bias) << 41;
  memcpy(block->shared + offset, &word, 8);
}

MBarrier& mbarrier_at(Block* block, u32 offset, Here here) {
  if (offset % 8 != 0)
    fail(here, "mbarrier at shared address %u: needs a multiple of 8", offset + shared_window);
  for (MBarrier& barrier : block->async->mbarriers)
    if (barrier.offset == offset) return barrier;
  fail(here, "the mbarrier at shared address %u is not initialised (yet)", offset + shared_window);
}

void mbarrier_init(u32 address, u32 count, Here here) {
  Fiber* fiber = current();
  shared_pointer(address, 8, 8, here);
  if (count == 0 || count >= 1 << 20) fail(here, "mbarrier_init with %u arrivals: needs 1 to 1048575", count);
  const u32 offset = address - shared_window;
  store_fields(fiber->block, offset, {0, count, count, 0});
  for (MBarrier& barrier : fiber->block->async->mbarriers)
    if (barrier.offset == offset)
      fail(here, "the mbarrier at shared address %u is initialised twice", address);
  fiber->block->async->mbarriers.push_back({offset, false, fiber, here, here, {}});
}

void mbarrier_publish() {
  for (MBarrier& barrier : current()->block->async->mbarriers)
    if (barrier.owner == current()) barrier.published = true;
}

static void update(Block* block, MBarrier& barrier, Fields f, Here here) {
  if (f.bytes < -(1 << 20) || f.bytes >= 1 << 20)
    fail(here, "an mbarrier phase with %lld bytes outstanding: at most 1048575", f.bytes);
  if (f.pending == 0 && f.bytes == 0) {
    f.phase ^= 1;
    f.pending = f.count;
    trace_step(block);
    for (Fiber* fiber : barrier.waiting) wake(fiber);
    barrier.waiting.clear();
  }
  store_fields(block, barrier.offset, f);
}

void mbarrier_count_arrival(Block* block, u32 offset, Here here) {
  MBarrier& barrier = mbarrier_at(block, offset, here);
  Fields f = load_fields(block, offset);
  if (f.pending == 0)
    fail(here, "more arrivals than the %llu of the mbarrier at shared address %u", f.count,
         offset + shared_window);
  f.pending--;
  update(block, barrier, f, here);
}

void mbarrier_credit(Block* block, u32 offset, u32 n_bytes, Here here) {
  MBarrier& barrier = mbarrier_at(block, offset, here);
  Fields f = load_fields(block, offset);
  f.bytes -= n_bytes;
  update(block, barrier, f, here);
}

void mbarrier_arrive(u32 address, Here here) {
  Block* block = cluster_block(address, 8, here);
  if (block != current()->block && !mbarrier_at(block, address, here).published)
    fail(here, "the peer's mbarrier has not been published to the cluster: mbarrier_init_fence() is missing");
  mbarrier_count_arrival(block, address, here);
}

void mbarrier_expect(u32 address, u32 n_bytes, Here here) {
  Block* block = cluster_block(address, 8, here);
  MBarrier& barrier = mbarrier_at(block, address, here);
  barrier.expected_at = here;
  Fields f = load_fields(block, address);
  f.bytes += n_bytes;
  update(block, barrier, f,
         here);   // it may be the last thing a phase waits for, when the bytes have landed already
}

bool mbarrier_test(u32 address, u32 parity, Here here) {
  Fiber* fiber = current();
  mbarrier_at(fiber->block, address - shared_window, here);
  if (load_fields(fiber->block, address - shared_window).phase != (parity & 1)) return true;
  pause(here);
  return load_fields(fiber->block, address - shared_window).phase != (parity & 1);
}

void mbarrier_wait(u32 address, u32 parity, Here here) {
  Fiber* fiber = current();
  const u32 offset = address - shared_window;
  shared_pointer(address, 8, 8, here);
  while (mbarrier_at(fiber->block, offset, here), load_fields(fiber->block, offset).phase == (parity & 1)) {
    mbarrier_at(fiber->block, offset, here).waiting.push_back(fiber);
    fiber->wait_a = address;
    fiber->wait_b = parity & 1;
    suspend(Wait::mbarrier, here);
  }
}

std::string describe_mbarrier(Block* block, u64 address) {
  const Fields f = load_fields(block, static_cast<u32>(address) - shared_window);
  return "; it waits for " + std::to_string(f.pending) + " of " + std::to_string(f.count) + " arrivals and " +
         std::to_string(f.bytes) + " bytes";
}

// ---- clusters: bits 24 and up of an address are the rank + 1, none means the own block

u32 cluster_rank() { return current()->block->rank; }
u32 cluster_size() { return current()->worker->n_blocks; }

u32 cluster_address(u32 address, u32 rank, Here here) {
  shared_pointer(address, 1, 1, here);
  if (rank >= cluster_size()) fail(here, "block %u of a cluster of %u", rank, cluster_size());
  return address | (rank + 1) << 24;
}

Block* cluster_block(u32& address, u32 n_bytes, Here here) {
  Fiber* fiber = current();
  const u32 rank = address >> 24;
  Block* block = rank == 0 ? fiber->block : fiber->worker->blocks[rank - 1];
  shared_pointer(address & 0xffffff, n_bytes, 1, here);
  if (block->n_live == 0)
    fail(here, "block %u of the cluster has left the kernel: its shared memory is gone", rank - 1);
  address = (address & 0xffffff) - shared_window;
  return block;
}

u8* cluster_pointer(u32 address, u32 n_bytes, Here here) {
  u32 offset = address;
  Block* block = cluster_block(offset, n_bytes, here);
  if (offset % n_bytes != 0)
    fail(here, "misaligned cluster address %#x: no multiple of %u", address, n_bytes);
  current()->counters->shared += n_bytes;
  return block->shared + offset;
}

void cluster_arrive(Here here) {
  Fiber* fiber = current();
  Worker* worker = fiber->worker;
  if (fiber->async->cluster_arrived) fail(here, "cluster_arrive twice without cluster_wait");
  fiber->async->cluster_arrived = true;
  fiber->async->cluster_phase = worker->cluster_phase;
  worker->cluster_arrived++;
  cluster_check(worker);
}

void cluster_check(Worker* worker) {   // threads that have left are not waited for
  if (worker->cluster_arrived == 0 || worker->cluster_arrived < worker->n_live) return;
  worker->cluster_arrived = 0;
  worker->cluster_phase++;
  for (int b = 0; b < worker->n_blocks; b++)
    for (int i = 0; i < worker->blocks[b]->n_threads; i++)
      if (worker->blocks[b]->fibers[i]->wait == Wait::cluster) wake(worker->blocks[b]->fibers[i]);
}

void cluster_wait(Here here) {
  Fiber* fiber = current();
  if (!fiber->async->cluster_arrived) fail(here, "cluster_wait without cluster_arrive");
  if (fiber->worker->cluster_phase == fiber->async->cluster_phase) suspend(Wait::cluster, here);
  fiber->async->cluster_arrived = false;
}

// ---- registers and election

void set_registers(int count, bool grows, Here here) {
  Fiber* fiber = current();
  BlockAsync& block = *fiber->block->async;
  FiberAsync& mine = *fiber->async;
  if (count < 24 || count > 256 || count % 8 != 0)
    fail(here, "setmaxnreg %d: needs a multiple of 8 from 24 to 256", count);
  if (grows ? count < mine.registers : count > mine.registers)
    fail(here, "setmaxnreg.%s to %d from %d", grows ? "inc" : "dec", count, mine.registers);
  warp_exchange("setmaxnreg", &count, sizeof count, nullptr, here);
  while (grows && count - mine.registers > block.free_registers) {
    fiber->wait_a = count;
    suspend(Wait::registers, here);
  }
  block.free_registers += mine.registers - count;
  mine.registers = count;
  for (int i = 0; i < fiber->block->n_threads; i++)
    if (!grows && fiber->block->fibers[i]->wait == Wait::registers && fiber->block->fibers[i] != fiber) {
      fiber->block->fibers[i]->wait = Wait::nothing;
      wake(fiber->block->fibers[i]);
    }
}

static void elect(u8* slots) {   // any fixed lane: by the seed, so that nobody relies on lane 0
  const Fiber* fiber = current();
  const u32 lanes = fiber->warp->arrived, turn = fiber->worker->launch->request.seed & 31;
  const u32 turned = lanes >> turn | (turn ? lanes << (32 - turn) : 0);
  const int lane = (__builtin_ctz(turned) + turn) & 31;
  for (int i = 0; i < 32; i++) memcpy(slots + slot_bytes * i, &lane, sizeof lane);
}

bool elected(Here here) {
  const int lane = self->lane;
  int chosen;
  memcpy(&chosen, warp_exchange("elect_one", &lane, sizeof lane, elect, here), sizeof chosen);
  return lane == chosen;
}

// ---- ends

void check_exit(Fiber* fiber) {
  finish_stores(fiber);
  if (fiber->block->n_live > 1) return;
  for (const MBarrier& barrier : fiber->block->async->mbarriers) {
    const Fields f = load_fields(fiber->block, barrier.offset);
    if (f.bytes != 0)
      fail(barrier.expected_at, "the block ends while %lld bytes of the mbarrier at shared address %u are %s",
           f.bytes < 0 ? -f.bytes : f.bytes, barrier.offset + shared_window,
           f.bytes > 0 ? "still expected" : "more than it expected");
  }
}

void drop_async(Worker* worker, bool finished) {
  if (finished && !worker->pending.empty() && !worker->launch->stop) {
    const Copy& copy = worker->pending.front();
    std::lock_guard<std::mutex> lock(worker->launch->guard);
    if (worker->launch->error.empty())
      worker->launch->error = describe(copy.block->fibers[0], copy.here,
                                       "the block ends while this copy into its shared memory is in flight");
    worker->launch->stop = true;
  }
  worker->pending.clear();
  worker->cluster_arrived = 0;
}

}   // namespace emulated
