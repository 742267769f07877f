// mbarrier.cuh - barriers in shared memory that count arrivals and bytes.   sm_90 and later
//
// An mbarrier is a u64 in shared memory (a member Shared<u64, 1, n>).  A phase ends when `count` threads have
// arrived and all expected bytes have landed; the next begins by itself.  wait(b, parity) returns when the
// phase of that parity has ended: a fresh barrier blocks wait(b, 0) and lets wait(b, 1) pass, so a ring of
// stages is walked with full: wait(full[i % n], (i / n) & 1) and empty: wait(empty[i % n], ((i / n) & 1) ^
// 1).
#pragma once
#include "platform.cuh"

#ifdef CUFLASH_EMULATED
#define WHERE , emulated::Here here = emulated::Here::now()
DEVICE void mbarrier_init(u32 b, u32 count WHERE) { emulated::mbarrier_init(b, count, here); }
DEVICE void mbarrier_init_fence() { emulated::mbarrier_publish(); }
DEVICE void mbarrier_arrive(u32 b WHERE) { emulated::mbarrier_arrive(b, here); }
DEVICE void mbarrier_expect(u32 b, u32 n_bytes WHERE) { emulated::mbarrier_expect(b, n_bytes, here); }
DEVICE void mbarrier_arrive_expect(u32 b, u32 n_bytes WHERE) {
  emulated::mbarrier_expect(b, n_bytes, here);
  emulated::mbarrier_arrive(b, here);
}
DEVICE void mbarrier_arrive_remote(u32 b, u32 rank WHERE) {
  emulated::mbarrier_arrive(emulated::cluster_address(b, rank, here), here);
}
DEVICE bool mbarrier_test(u32 b, u32 parity WHERE) { return emulated::mbarrier_test(b, parity, here); }
DEVICE void mbarrier_wait(u32 b, u32 parity WHERE) { emulated::mbarrier_wait(b, parity, here); }
#undef WHERE
#else
DEVICE void mbarrier_init(u32 b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(count) : "memory");
}
// By the thread that initialised, before the block_sync or cluster_sync that starts the use: TMA and the
// peers see the barriers.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
// n_bytes more must land in this phase; no arrival.
DEVICE void mbarrier_expect(u32 b, u32 n_bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n_bytes) : "memory");
}
// The same, and one arrival.
DEVICE void mbarrier_arrive_expect(u32 b, u32 n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n_bytes) : "memory");
}
// Arrives at the barrier at the same place in block `rank` of the cluster.  Orders what TMA moved, not
// ordinary stores to the peer: the .release.cluster form costs a fence of the whole GPU at every arrival.
DEVICE void mbarrier_arrive_remote(u32 b, u32 rank) {
  asm volatile(
      "{ .reg .b32 peer; mapa.shared::cluster.u32 peer, %0, %1; mbarrier.arrive.shared::cluster.b64 _, "
      "[peer]; }" ::"r"(b),
      "r"(rank)
      : "memory");
}
DEVICE bool mbarrier_test(u32 b, u32 parity) {   // does not wait
  u32 ended;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(ended)
      : "r"(b), "r"(parity)
      : "memory");
  return ended;
}
DEVICE void mbarrier_wait(u32 b, u32 parity) {
  u32 ended;
  do
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(b), "r"(parity)
        : "memory");
  while (!ended);   // try_wait sleeps for a while by itself
}
#endif
