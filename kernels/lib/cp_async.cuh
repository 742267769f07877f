// cp_async.cuh - copies from global to shared memory that run while the thread goes on.   sm_80 and later
//
// Each thread's copies form groups: commit closes one, wait<n> returns when all but the newest n groups of
// this thread have landed.  Other threads may read them after a barrier that follows the wait.  To the async
// proxy (wgmma, TMA stores) they are ordinary writes: wait, fence_async_shared(), barrier.
#pragma once
#include "platform.cuh"

#ifdef CUFLASH_EMULATED
// n_valid of n_bytes are copied, the rest is filled with zeros: 0 reads nothing, so the address may be any.
template <int n_bytes = 16> DEVICE void cp_async(u32 shared, const void* global, u32 n_valid = n_bytes,
                                                 emulated::Here here = emulated::Here::now()) {
  emulated::copy_async(shared, global, n_bytes, n_valid, here);
}
DEVICE void cp_async_commit() { emulated::copy_commit(); }
template <int n_pending> DEVICE void cp_async_wait(emulated::Here here = emulated::Here::now()) {
  emulated::copy_wait(n_pending, here);
}
DEVICE void cp_async_arrive(u32 mbarrier, emulated::Here here = emulated::Here::now()) {
  emulated::copy_arrive(mbarrier, here);
}
#else
template <int n_bytes = 16> DEVICE void cp_async(u32 shared, const void* global, u32 n_valid = n_bytes) {
  static_assert(n_bytes == 4 || n_bytes == 8 || n_bytes == 16, "cp_async: 4, 8 or 16 bytes");
  const u64 source = __cvta_generic_to_global(global);
  if constexpr (n_bytes == 16)   // .cg: not through L1; neighbours in the line are fetched to L2
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
                 "r"(n_valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(source), "n"(n_bytes),
                 "r"(n_valid)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n_pending> DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n_pending) : "memory");
}
// One arrival on an mbarrier when all copies this thread has issued so far have landed.   sm_90
DEVICE void cp_async_arrive(u32 mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}
#endif
