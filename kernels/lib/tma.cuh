// tma.cuh - one thread copies a tile: TMA (through a tensor map), bulk copies (without), and fences.   sm_90
//
// A tensor map (cuflash/tensormap.py) describes an array of 2 to 5 axes, a box, and how the box lies in
// shared memory: rows of box[0] elements, densely packed, with 16-byte chunk c of row r at c ^ (r % 8) for
// the 128-byte swizzle.  It is a kernel parameter (const __grid_constant__) or part of one.
// Coordinates are elements, first axis first.  The first one times the element size is a multiple of 16
// bytes, and those of a store are not negative: anything else is an illegal instruction.  Elements outside
// the array are zeros in a load and dropped in a store; the mbarrier is always credited with the full box.
// Stores and reduce-adds form groups per thread: the thread that issued them commits and waits.
#pragma once
#include "platform.cuh"

struct alignas(64) TensorMap {
  u64 opaque[16];
};

#ifdef CUFLASH_EMULATED
#define WHERE , emulated::Here here = emulated::Here::now()
using TmaAt = emulated::Coordinates;
DEVICE TmaAt tma_at(int x, int y) { return {{x, y, 0, 0, 0}, 2}; }
DEVICE TmaAt tma_at(int x, int y, int z) { return {{x, y, z, 0, 0}, 3}; }
DEVICE TmaAt tma_at(int x, int y, int z, int w) { return {{x, y, z, w, 0}, 4}; }
DEVICE TmaAt tma_at(int x, int y, int z, int w, int v) { return {{x, y, z, w, v}, 5}; }
DEVICE void tma_load(u32 shared, const TensorMap& map, u32 mbarrier, TmaAt at WHERE) {
  emulated::tensor_load(shared, &map, mbarrier, at, 0, here);
}
DEVICE void tma_load_hint(u32 shared, const TensorMap& map, u32 mbarrier, TmaAt at, u64 policy WHERE) {
  emulated::tensor_load(shared, &map, mbarrier, at, 0, here);
}
DEVICE void tma_load_multicast(u32 shared, const TensorMap& map, u32 mbarrier, TmaAt at,
                               u32 block_mask WHERE) {
  emulated::tensor_load(shared, &map, mbarrier, at, block_mask, here);
}
DEVICE void tma_store(const TensorMap& map, u32 shared, TmaAt at WHERE) {
  emulated::tensor_store(&map, shared, at, false, here);
}
DEVICE void tma_reduce_add(const TensorMap& map, u32 shared, TmaAt at WHERE) {
  emulated::tensor_store(&map, shared, at, true, here);
}
DEVICE void tma_prefetch_map(const TensorMap&) {}
DEVICE void bulk_load(u32 shared, const void* global, u32 n_bytes, u32 mbarrier WHERE) {
  emulated::bulk_load(shared, global, n_bytes, mbarrier, here);
}
DEVICE void bulk_store(void* global, u32 shared, u32 n_bytes WHERE) {
  emulated::bulk_store(global, shared, n_bytes, false, here);
}
DEVICE void bulk_reduce_add(float* global, u32 shared, u32 n_bytes WHERE) {
  emulated::bulk_store(global, shared, n_bytes, true, here);
}
DEVICE void bulk_to_peer(u32 peer_shared, u32 shared, u32 n_bytes, u32 peer_mbarrier WHERE) {
  emulated::bulk_to_peer(peer_shared, shared, n_bytes, peer_mbarrier, here);
}
DEVICE void bulk_commit() { emulated::bulk_commit(); }
template <int n_pending> DEVICE void bulk_wait_read(emulated::Here here = emulated::Here::now()) {
  emulated::bulk_wait(n_pending, true, here);
}
template <int n_pending> DEVICE void bulk_wait(emulated::Here here = emulated::Here::now()) {
  emulated::bulk_wait(n_pending, false, here);
}
DEVICE void fence_async_shared() { emulated::fence_async(); }
DEVICE void fence_async_global() {}
DEVICE bool elect_one(emulated::Here here = emulated::Here::now()) { return emulated::elected(here); }
#undef WHERE
#else
struct TmaAt {
  int x, y, z, w, v;
  int rank;
};
DEVICE TmaAt tma_at(int x, int y) { return {x, y, 0, 0, 0, 2}; }
DEVICE TmaAt tma_at(int x, int y, int z) { return {x, y, z, 0, 0, 3}; }
DEVICE TmaAt tma_at(int x, int y, int z, int w) { return {x, y, z, w, 0, 4}; }
DEVICE TmaAt tma_at(int x, int y, int z, int w, int v) { return {x, y, z, w, v, 5}; }

// One instruction for every rank: at.rank is a constant once inlined, so one branch is left.  Operands are
// the fixed ones first, then the coordinates, whose numbers are n0 to n4.
#define TMA_EACH_RANK(begin, middle, end, n0, n1, n2, n3, n4, ...)                                           \
  if (at.rank == 2)                                                                                          \
    asm volatile(begin ".2d" middle "{%" #n0 ", %" #n1 "}" end::__VA_ARGS__, "r"(at.x), "r"(at.y)            \
                 : "memory");                                                                                \
  else if (at.rank == 3)                                                                                     \
    asm volatile(begin ".3d" middle "{%" #n0 ", %" #n1 ", %" #n2 "}" end::__VA_ARGS__, "r"(at.x), "r"(at.y), \
                 "r"(at.z)                                                                                   \
                 : "memory");                                                                                \
  else if (at.rank == 4)                                                                                     \
    asm volatile(begin ".4d" middle "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}" end::__VA_ARGS__, "r"(at.x),  \
                 "r"(at.y), "r"(at.z), "r"(at.w)                                                             \
                 : "memory");                                                                                \
  else                                                                                                       \
    asm volatile(begin ".5d" middle "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 ", %" #n4 "}" end::__VA_ARGS__,   \
                 "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(at.v)                                       \
                 : "memory")
#define TMA_LOAD ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"

DEVICE u64 map_address(const TensorMap& map) { return reinterpret_cast<u64>(&map); }

// Box at `at` -> shared (128-byte aligned, 1024 with the 128-byte swizzle); box bytes are credited to the
// mbarrier.
DEVICE void tma_load(u32 shared, const TensorMap& map, u32 mbarrier, TmaAt at) {
  TMA_EACH_RANK("cp.async.bulk.tensor", TMA_LOAD " [%0], [%1, ", "], [%2];", 3, 4, 5, 6, 7, "r"(shared),
                "l"(map_address(map)), "r"(mbarrier));
}
// The same with an L2 policy (evict_first, evict_last).
DEVICE void tma_load_hint(u32 shared, const TensorMap& map, u32 mbarrier, TmaAt at, u64 policy) {
  TMA_EACH_RANK("cp.async.bulk.tensor", TMA_LOAD ".L2::cache_hint [%0], [%1, ", "], [%2], %3;", 4, 5, 6, 7, 8,
                "r"(shared), "l"(map_address(map)), "r"(mbarrier), "l"(policy));
}
// Into the same place of every block of the cluster whose bit is set; each block's mbarrier is credited.
DEVICE void tma_load_multicast(u32 shared, const TensorMap& map, u32 mbarrier, TmaAt at, u32 block_mask) {
  TMA_EACH_RANK("cp.async.bulk.tensor", TMA_LOAD ".multicast::cluster [%0], [%1, ", "], [%2], %3;", 4, 5, 6,
                7, 8, "r"(shared), "l"(map_address(map)), "r"(mbarrier), "h"(static_cast<u16>(block_mask)));
}
// Shared -> box at `at`.  Writers of the tile: fence_async_shared(), then a barrier, then this.
DEVICE void tma_store(const TensorMap& map, u32 shared, TmaAt at) {
  TMA_EACH_RANK("cp.async.bulk.tensor", ".global.shared::cta.tile.bulk_group [%0, ", "], [%1];", 2, 3, 4, 5,
                6, "l"(map_address(map)), "r"(shared));
}
DEVICE void tma_reduce_add(const TensorMap& map, u32 shared, TmaAt at) {
  TMA_EACH_RANK("cp.reduce.async.bulk.tensor", ".global.shared::cta.add.tile.bulk_group [%0, ", "], [%1];", 2,
                3, 4, 5, 6, "l"(map_address(map)), "r"(shared));
}
#undef TMA_EACH_RANK
#undef TMA_LOAD
DEVICE void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map_address(map)) : "memory");
}

// n_bytes in one piece; addresses and n_bytes are multiples of 16.
DEVICE void bulk_load(u32 shared, const void* global, u32 n_bytes, u32 mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(n_bytes), "r"(mbarrier)
      : "memory");
}
DEVICE void bulk_store(void* global, u32 shared, u32 n_bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
      "r"(shared), "r"(n_bytes)
      : "memory");
}
DEVICE void bulk_reduce_add(float* global, u32 shared, u32 n_bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared), "r"(n_bytes)
               : "memory");
}
// Own shared memory -> a peer's (cluster_address), whose mbarrier is credited.
DEVICE void bulk_to_peer(u32 peer_shared, u32 shared, u32 n_bytes, u32 peer_mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          peer_shared),
      "r"(shared), "r"(n_bytes), "r"(peer_mbarrier)
      : "memory");
}
// Stores of this thread: close a group; wait until all but the newest n groups have read their source (it may
// be overwritten), or have written global memory too.  A block must not end with sources unread.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int n_pending> DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n_pending) : "memory");
}
template <int n_pending> DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n_pending) : "memory");
}

// This thread's ordinary writes so far become visible to what TMA and wgmma read after the next barrier.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// True in one lane of a converged warp, always the same one.
DEVICE bool elect_one() {
  u32 mine;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(mine));
  return mine;
}
#endif

// L2 policies, as createpolicy.fractional makes them.
constexpr u64 evict_first = 0x12f0000000000000ull;
constexpr u64 evict_last = 0x14f0000000000000ull;
