// barrier.cuh - barriers of a block: all of it, or a counted part.
//
// A barrier orders ordinary accesses to shared and global memory among those who pass it.  What TMA and wgmma
// read needs fence_async_shared() by every writer before it (lib/tma.cuh).
#pragma once
#include "platform.cuh"

#ifdef CUFLASH_EMULATED
DEVICE void block_sync(emulated::Here here = emulated::Here::now()) { emulated::barrier_sync(0, 0, here); }
DEVICE void barrier_sync(int id, int threads, emulated::Here here = emulated::Here::now()) {
  emulated::barrier_sync(id, threads, here);
}
DEVICE void barrier_arrive(int id, int threads, emulated::Here here = emulated::Here::now()) {
  emulated::barrier_arrive(id, threads, here);
}
#else
DEVICE void block_sync() { __syncthreads(); }
// Named barrier id (1..15; 0 is block_sync): `threads` of the block in all, a multiple of 32, either wait
// here or arrive.
DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif
