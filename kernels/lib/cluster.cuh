// cluster.cuh - blocks of a cluster: rank, barrier, and each other's shared memory.   sm_90 and later
//
// A shared address and a rank make a cluster address: what the same place is called in block `rank`.  A block
// must not leave while a peer may still reach into it: cluster_sync() at the end.
#pragma once
#include "platform.cuh"

#ifdef CUFLASH_EMULATED
#define WHERE , emulated::Here here = emulated::Here::now()
DEVICE u32 cluster_rank() { return emulated::cluster_rank(); }
DEVICE u32 cluster_size() { return emulated::cluster_size(); }
DEVICE void cluster_arrive(emulated::Here here = emulated::Here::now()) { emulated::cluster_arrive(here); }
DEVICE void cluster_arrive_relaxed(emulated::Here here = emulated::Here::now()) {
  emulated::cluster_arrive(here);
}
DEVICE void cluster_wait(emulated::Here here = emulated::Here::now()) { emulated::cluster_wait(here); }
DEVICE u32 cluster_address(u32 address, u32 rank WHERE) {
  return emulated::cluster_address(address, rank, here);
}
template <class T> DEVICE T cluster_load(u32 address WHERE) {
  return *reinterpret_cast<T*>(emulated::cluster_pointer(address, sizeof(T), here));
}
template <class T> DEVICE void cluster_store(u32 address, T value WHERE) {
  *reinterpret_cast<T*>(emulated::cluster_pointer(address, sizeof(T), here)) = value;
}
#undef WHERE
#else
DEVICE u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE u32 cluster_size() {
  u32 r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Publishes nothing: the other form waits until the whole GPU sees all that the thread has written.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 cluster_address(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// T of 4 bytes: float, u32, i32.
template <class T> DEVICE T cluster_load(u32 address) {
  static_assert(sizeof(T) == 4, "cluster_load: 4 bytes");
  u32 bits;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  return __builtin_bit_cast(T, bits);
}
template <class T> DEVICE void cluster_store(u32 address, T value) {
  static_assert(sizeof(T) == 4, "cluster_store: 4 bytes");
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(__builtin_bit_cast(u32, value))
               : "memory");
}
#endif
DEVICE void cluster_sync() {   // all threads of all blocks of the cluster
  cluster_arrive();
  cluster_wait();
}
