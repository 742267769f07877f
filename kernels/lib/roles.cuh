// roles.cuh - a block of one producer warpgroup and n_groups consumers, and the rings they share.   sm_90a
//
// n_warps counts the consumers' warps: warpgroup 0 of the block is the producer, of which one warp copies;
// warpgroup 1 + g is consumer g and owns rows 64 g .. 64 g + 63 of the query tile.
#pragma once
#include "mbarrier.cuh"
#include "params.cuh"

constexpr int n_groups = n_warps / 4;
constexpr int n_role_threads = n_threads + 128;   // of the block
static_assert(n_warps % 4 == 0 && n_groups >= 1 && n_groups <= 4, "roles: 1 to 4 consumer warpgroups");

// Registers of a thread by setmaxnreg.  The block starts with 65536 / threads, rounded down to a multiple of
// 8, for everyone; what the producer gives back the consumers share.
constexpr bool is_busy = has_block_mask || is_packed || has_key_lengths;   // the producer has more to know
constexpr int producer_registers =
    n_groups == 1 ? 56 : n_groups == 2 ? (is_busy ? 40 : 24) : n_groups == 3 ? 32 : 24;
constexpr int consumer_registers =
    n_groups == 1 ? 256 : n_groups == 2 ? (is_busy ? 232 : 240) : n_groups == 3 ? 160 : 112;

// Where someone stands in a ring of stages.  full, empty: the stages' mbarriers.
template <int n> struct Ring {
  int stage = 0;
  u32 phase = 0;
  DEVICE void next() {
    if (++stage == n) stage = 0, phase ^= 1;
  }
  template <class Barriers> DEVICE void wait_full(Barriers& full) const {
    mbarrier_wait(full.address(0, stage), phase);
  }
  template <class Barriers> DEVICE void wait_empty(Barriers& empty) const {   // the first round passes
    mbarrier_wait(empty.address(0, stage), phase ^ 1);
  }
};
