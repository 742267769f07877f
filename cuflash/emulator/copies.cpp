// copies.cpp - cp.async, TMA and bulk copies.
//
// "Early" a copy takes effect when it is issued: what others still read in its target is lost.  "Late" a load
// lands when no thread could run without it, a cp.async when its thread waits for its group, a store reads
// its source when its group is waited for: what was read too soon is old, what was overwritten too soon is
// gone.
#include <algorithm>

#include "runtime.hpp"

namespace emulated {

static bool late() { return current()->worker->launch->request.late_copies != 0; }

const Buffer* buffer_of(const void* address) {   // Global::address has just said which array this is
  return self->hint_address == address ? self->hint_buffer : find_buffer(address);
}

// ---- cp.async: an ordinary access that another engine makes

static void land(Fiber* fiber, const CpAsync& copy) {
  u8* to = fiber->block->shared + copy.offset;
  if (copy.n_valid != 0) memcpy(to, copy.global, copy.n_valid);
  memset(to + copy.n_valid, 0, copy.n_bytes - copy.n_valid);
  if (fiber->worker->launch->request.async_proxy)
    fiber->async->touched.push_back({copy.offset, copy.n_bytes});
}

void copy_async(u32 shared, const void* global, u32 n_bytes, u32 n_valid, Here here) {
  Fiber* fiber = current();
  if (n_valid > n_bytes) fail(here, "cp.async of %u bytes, %u of them valid", n_bytes, n_valid);
  shared_pointer(shared, n_bytes, n_bytes, here);
  CpAsync copy = {shared - shared_window,        static_cast<const u8*>(global), nullptr, n_bytes, n_valid,
                  fiber->async->copies_committed};
  if (n_valid != 0) {
    copy.buffer = buffer_of(global);
    checked_global(copy.buffer, global, 0, n_valid, n_bytes, here);
    count_read(copy.buffer, global, n_valid);
  }
  fiber->counters->shared += n_bytes;
  if (late())
    fiber->async->copies.push_back(copy);
  else
    land(fiber, copy);
}

void copy_commit() { current()->async->copies_committed++; }

void copy_wait(int n_pending, Here) {
  Fiber* fiber = current();
  FiberAsync& async = *fiber->async;
  size_t n = 0;
  while (n < async.copies.size() && async.copies[n].group + n_pending < async.copies_committed)
    land(fiber, async.copies[n++]);
  async.copies.erase(async.copies.begin(), async.copies.begin() + n);
}

void copy_arrive(u32 mbarrier, Here here) {
  Fiber* fiber = current();
  const u32 offset = mbarrier - shared_window;
  mbarrier_at(fiber->block, offset, here);
  if (!late()) return mbarrier_count_arrival(fiber->block, offset, here);
  Copy copy = {};
  copy.kind = Copy::arrival;
  copy.block = fiber->block;
  copy.fiber = fiber;
  copy.mbarrier = offset;
  copy.pieces.swap(fiber->async->copies);
  copy.here = here;
  fiber->worker->pending.push_back(copy);
}

// ---- tensor maps

static TensorMapData read_map(const void* map, Coordinates at, Here here) {
  TensorMapData data;
  memcpy(&data, map, sizeof data);
  if (data.magic != tensor_map_magic)
    fail(here, "this is no tensor map of the emulator (cuflash/tensormap.py makes them)");
  if (reinterpret_cast<u64>(map) % 64 != 0)
    fail(here, "the tensor map is not 64-byte aligned: pass it as const __grid_constant__");
  if (data.rank != at.rank) fail(here, "%d coordinates for a tensor map of %d axes", at.rank, data.rank);
  if (at.at[0] * data.itemsize % 16 != 0)   // an illegal instruction on the device
    fail(here, "the first coordinate, %d elements of %d bytes, is no multiple of 16 bytes", at.at[0],
         data.itemsize);
  return data;
}

static u32 box_bytes(const TensorMapData& map) {
  u32 n = map.itemsize;
  for (int axis = 0; axis < map.rank; axis++) n *= map.box[axis];
  return n;
}

static u32 swizzle_code(const TensorMapData& map) {
  return map.swizzle == 0 ? 0 : 4 - map.swizzle;
}   // driver's 3 is wgmma's 1

// Calls piece(offset in the unswizzled box, global address or nullptr, bytes) for each 16-byte chunk or part
// of one.
template <class F> static void each_piece(const TensorMapData& map, Coordinates at, F piece) {
  const i64 line = static_cast<i64>(map.box[0]) * map.itemsize;
  const i64 low = static_cast<i64>(at.at[0]) * map.itemsize,
            end = static_cast<i64>(map.dims[0]) * map.itemsize;
  i64 n_lines = 1;
  for (int axis = 1; axis < map.rank; axis++) n_lines *= map.box[axis];
  for (i64 i = 0; i < n_lines; i++) {
    u64 address = map.address;
    bool inside = true;
    for (i64 axis = 1, rest = i; axis < map.rank; axis++) {
      const i64 index = at.at[axis] + rest % map.box[axis];
      rest /= map.box[axis];
      inside = inside && index >= 0 && index < static_cast<i64>(map.dims[axis]);
      address += static_cast<u64>(index) * map.strides[axis - 1];
    }
    for (i64 byte = 0; byte < line; byte += 16) {   // the array may end within a chunk
      i64 from = byte;
      const i64 stop = byte + 16;
      while (from < stop) {
        const bool here = inside && low + from >= 0 && low + from < end;
        i64 to = from + map.itemsize;
        while (to < stop && (inside && low + to >= 0 && low + to < end) == here) to += map.itemsize;
        piece(static_cast<u32>(i * line + from),
              here ? reinterpret_cast<u8*>(address + static_cast<u64>(low + from)) : nullptr,
              static_cast<u32>(to - from));
        from = to;
      }
    }
  }
}

// ---- loads

static void land(Worker* worker, Copy& copy) {
  Block* issuer = copy.block;
  if (copy.kind == Copy::arrival) {
    for (const CpAsync& piece : copy.pieces) land(copy.fiber, piece);
    return mbarrier_count_arrival(issuer, copy.mbarrier, copy.here);
  }
  for (int rank = 0; rank < worker->n_blocks; rank++) {
    if (!(copy.blocks >> rank & 1)) continue;
    Block* block = worker->blocks[rank];
    if (block->n_live == 0)
      fail(copy.here, "a copy lands in block %d of the cluster, which has left the kernel", rank);
    u8* view = block->async->view;
    auto put = [&](u32 offset, const u8* from, u32 n) {
      if (from)
        memcpy(view + offset, from, n);
      else
        memset(view + offset, 0, n);
      memcpy(block->shared + offset, view + offset, n);
    };
    if (copy.kind == Copy::tensor) {
      const u32 code = swizzle_code(copy.map);
      each_piece(copy.map, copy.at,
                 [&](u32 at, const u8* global, u32 n) { put(swizzled(copy.offset + at, code), global, n); });
    } else {
      put(copy.offset, copy.kind == Copy::bulk ? copy.global : issuer->async->view + copy.source,
          copy.n_bytes);
    }
    mbarrier_credit(block, copy.mbarrier, copy.n_bytes, copy.here);
  }
}

static void issue(Copy& copy) {
  Worker* worker = current()->worker;
  current()->counters->async_shared += copy.n_bytes;
  if (late())
    worker->pending.push_back(copy);
  else
    land(worker, copy);
}

bool advance_copies(Worker* worker) {
  if (worker->pending.empty()) return false;
  const u64 seed = worker->launch->request.seed;
  const size_t i = seed == 0 ? 0 : worker->random() % worker->pending.size();
  Copy copy = worker->pending[i];
  worker->pending.erase(worker->pending.begin() + i);
  Thread* before = self;
  self = copy.fiber;   // whom a message should name
  land(worker, copy);
  self = before;
  return true;
}

static void check_mbarrier(Block* block, u32 offset, Here here) {
  if (!mbarrier_at(block, offset, here).published)
    fail(here,
         "the mbarrier at shared address %u has not been published to the async proxy: mbarrier_init_fence() "
         "is missing",
         offset + shared_window);
}

void tensor_load(u32 shared, const void* map, u32 mbarrier, Coordinates at, u32 block_mask, Here here) {
  Fiber* fiber = current();
  Copy copy = {};
  copy.kind = Copy::tensor;
  copy.block = fiber->block;
  copy.fiber = fiber;
  copy.blocks = block_mask == 0 ? 1u << fiber->block->rank : block_mask;
  copy.map = read_map(map, at, here);
  copy.at = at;
  copy.n_bytes = box_bytes(copy.map);
  copy.buffer = find_buffer(reinterpret_cast<const void*>(copy.map.address));
  copy.here = here;
  shared_pointer(shared, copy.n_bytes, 128, here);
  copy.offset = shared - shared_window;
  copy.mbarrier = mbarrier - shared_window;
  for (int rank = 0; rank < fiber->worker->n_blocks; rank++)
    if (copy.blocks >> rank & 1) check_mbarrier(fiber->worker->blocks[rank], copy.mbarrier, here);
  each_piece(copy.map, at, [&](u32, const u8* global, u32 n) {
    if (global == nullptr) return;
    checked_global(copy.buffer, global, 0, n, 1, here);
    count_read(copy.buffer, global, n);
  });
  issue(copy);
}

static void check_bulk(u64 address, u32 n_bytes, Here here) {
  if (address % 16 != 0 || n_bytes % 16 != 0 || n_bytes == 0)
    fail(here, "bulk copy of %u bytes at address %#llx: both must be multiples of 16", n_bytes, address);
}

void bulk_load(u32 shared, const void* global, u32 n_bytes, u32 mbarrier, Here here) {
  Fiber* fiber = current();
  check_bulk(reinterpret_cast<u64>(global), n_bytes, here);
  shared_pointer(shared, n_bytes, 16, here);
  Copy copy = {};
  copy.kind = Copy::bulk;
  copy.block = fiber->block;
  copy.fiber = fiber;
  copy.blocks = 1u << fiber->block->rank;
  copy.offset = shared - shared_window;
  copy.n_bytes = n_bytes;
  copy.mbarrier = mbarrier - shared_window;
  copy.global = static_cast<const u8*>(global);
  copy.buffer = buffer_of(global);
  copy.here = here;
  check_mbarrier(fiber->block, copy.mbarrier, here);
  checked_global(copy.buffer, global, 0, n_bytes, 16, here);
  count_read(copy.buffer, global, n_bytes);
  issue(copy);
}

void bulk_to_peer(u32 peer_shared, u32 shared, u32 n_bytes, u32 peer_mbarrier, Here here) {
  Fiber* fiber = current();
  check_bulk(shared, n_bytes, here);
  shared_pointer(shared, n_bytes, 16, here);
  Copy copy = {};
  copy.kind = Copy::peer;
  copy.block = fiber->block;
  copy.fiber = fiber;
  copy.source = shared - shared_window;
  copy.n_bytes = n_bytes;
  copy.here = here;
  Block* peer = cluster_block(peer_shared, n_bytes, here);
  if (cluster_block(peer_mbarrier, 8, here) != peer)
    fail(here, "bulk_to_peer: data and mbarrier are in two different blocks");
  copy.blocks = 1u << peer->rank;
  copy.offset = peer_shared;
  copy.mbarrier = peer_mbarrier;
  check_mbarrier(peer, copy.mbarrier, here);
  issue(copy);
}

// ---- stores

static void read_source(Fiber* fiber, Store& store) {
  const u8* view = fiber->block->async->view;
  store.data.resize(store.n_bytes);
  if (store.tensor) {
    const u32 code = swizzle_code(store.map);
    for (u32 at = 0; at < store.n_bytes; at += 16)
      memcpy(&store.data[at], view + swizzled(store.offset + at, code), 16);
  } else {
    memcpy(store.data.data(), view + store.offset, store.n_bytes);
  }
  store.is_read = true;
}

static void put(const Store& store, u8* global, const u8* data, u32 n_bytes) {
  if (!store.adds) {
    memcpy(global, data, n_bytes);
    return;
  }
  for (u32 i = 0; i < n_bytes; i += 4) {
    float value;
    memcpy(&value, data + i, 4);
    atomic_add(reinterpret_cast<float*>(global + i), value);
  }
}

static void write_target(Store& store) {
  if (!store.tensor)
    put(store, store.global, store.data.data(), store.n_bytes);
  else
    each_piece(store.map, store.at, [&](u32 at, u8* global, u32 n) {
      if (global != nullptr) put(store, global, &store.data[at], n);
    });
  store.is_written = true;
}

static void count_store(const Buffer* buffer, const u8* global, u32 n_bytes, bool adds, Here here) {
  checked_global(buffer, global, 0, n_bytes, 1, here);
  if (adds)
    count_add(buffer, global, n_bytes);
  else
    count_write(buffer, global, n_bytes);
}

static void issue(Store& store) {
  Fiber* fiber = current();
  fiber->counters->async_shared += store.n_bytes;
  store.group = fiber->async->stores_committed;
  if (!late()) {
    read_source(fiber, store);
    write_target(store);
  }
  fiber->async->stores.push_back(store);
}

void tensor_store(const void* map, u32 shared, Coordinates at, bool adds, Here here) {
  Store store = {};
  store.tensor = true;
  store.adds = adds;
  store.map = read_map(map, at, here);
  for (int axis = 0; axis < at.rank; axis++)   // an illegal instruction on the device, unlike in a load
    if (at.at[axis] < 0) fail(here, "tensor store at a negative coordinate, %d on axis %d", at.at[axis], axis);
  if (adds && (store.map.itemsize != 4 || !store.map.is_float))
    fail(here, "tma_reduce_add: the emulator adds float32 only");
  store.at = at;
  store.n_bytes = box_bytes(store.map);
  store.buffer = find_buffer(reinterpret_cast<const void*>(store.map.address));
  store.here = here;
  shared_pointer(shared, store.n_bytes, 128, here);
  store.offset = shared - shared_window;
  each_piece(store.map, at, [&](u32, const u8* global, u32 n) {
    if (global != nullptr) count_store(store.buffer, global, n, adds, here);
  });
  issue(store);
}

void bulk_store(void* global, u32 shared, u32 n_bytes, bool adds, Here here) {
  check_bulk(reinterpret_cast<u64>(global), n_bytes, here);
  shared_pointer(shared, n_bytes, 16, here);
  Store store = {};
  store.adds = adds;
  store.global = static_cast<u8*>(global);
  store.buffer = buffer_of(global);
  store.offset = shared - shared_window;
  store.n_bytes = n_bytes;
  store.here = here;
  count_store(store.buffer, store.global, n_bytes, adds, here);
  issue(store);
}

void bulk_commit() { current()->async->stores_committed++; }

void bulk_wait(int n_pending, bool reads_only, Here) {
  Fiber* fiber = current();
  std::vector<Store>& stores = fiber->async->stores;
  for (Store& store : stores) {
    if (store.group + n_pending >= fiber->async->stores_committed) continue;
    if (!store.is_read) read_source(fiber, store);
    if (!reads_only && !store.is_written) write_target(store);
    store.here.file = nullptr;   // waited for
  }
  stores.erase(std::remove_if(stores.begin(), stores.end(),
                              [](const Store& s) { return s.is_written && s.here.file == nullptr; }),
               stores.end());
}

void finish_stores(Fiber* fiber) {
  for (Store& store : fiber->async->stores) {
    if (store.here.file != nullptr)
      fail(store.here,
           "a thread leaves the kernel while this store may still read shared memory: bulk_commit and "
           "bulk_wait_read<0> are missing");
    if (!store.is_written) write_target(store);
  }
  fiber->async->stores.clear();
}

}   // namespace emulated
