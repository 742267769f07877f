// persistent_block.cuh - a block of fwd_10_persistent: shared memory, and what its warps tell there.   sm_90a
//
// One warp copies (lib/producer.cuh), another plans where walks are short (lib/planner.cuh), those of the
// consumers multiply (lib/consumer.cuh).
#pragma once
#include "barrier.cuh"
#include "blocks.cuh"
#include "mask.cuh"
#include "maps.cuh"
#include "panels.cuh"
#include "roles.cuh"
#include "schedule.cuh"
#include "work.cuh"

using Walk = BlockWalk<tile_q, tile_kv, block_q, block_kv>;
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;
constexpr bool asks_elements = has_bias || masks_every_tile || asks_blocks;
constexpr bool reads_past_end = is_packed || has_key_lengths;   // TMA finds rows of others there, not zeros

// Key tiles [begin, end): of the whole query tile; that the 64 rows of a consumer see; that they see as a
// whole.
struct alignas(16) KeyTiles {
  Range all, mine, plain;
  i32 unused[2];
};

constexpr int n_announcers = plans ? n_groups : 1;   // lanes: each writes for a consumer
// Threads that read what a stage of K says of blocks, and so give it back; without blocks one of a group.
constexpr int n_readers = asks_blocks ? n_threads : has_block_mask ? n_warps : n_groups;
// Numbers of barriers: the planner may take the next query tile; group g may issue its products (TURN + g).
constexpr int MAY_PLAN = 1 + n_groups, TURN = MAY_PLAN + 1;
// Two groups issue their products in turn, or these meet and then both wait.  Elsewhere groups part by
// themselves, and turns cost more than they bring.
constexpr bool in_turns = causal && n_groups == 2 && !weighs_ahead && !plans;

using OTile = PanelTile<tile_q, head_dim_v_tile>;
struct QAndO {
  PanelTile<tile_q, head_dim_tile> Q[q_stages];
  OTile O;   // on its way to memory while the next tile is computed
  DEVICE OTile& buffer() { return O; }
};
struct QAlone {
  PanelTile<tile_q, head_dim_tile> Q[q_stages];
  DEVICE OTile& buffer() { return *static_cast<OTile*>(nullptr); }   // there is none, and nobody asks
};
struct Tiles : Choice<has_o_buffer, QAndO, QAlone>::type {
  PanelTile<tile_kv, head_dim_tile> K[n_stages];
  PanelTile<tile_kv, head_dim_v_tile> V[n_stages];
  Shared<Work, 1, 2> work;              // query tiles as the planner took them; i0 = NO_WORK: the end
  Shared<KeyTiles, n_groups, 2> keys;   // of them, for each consumer
  Shared<i32, 1, n_stages> j0;          // has_block_mask: the first key of the stage's tile, NO_TILE: no more
  Shared<u64, 1, n_stages> K_full, K_empty, V_full, V_empty;
  Shared<u64, 1, 2> work_full, work_empty;
  Shared<u64, 1, q_stages> Q_full, Q_empty;
  Shared<u64, 1, 1> V_landed, O_read;   // O_read, where O borrows stages of V: it has left them
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, n_stages> {};
static_assert(n_stages >= 2, "persistent_block: K is one tile ahead of V");

// Key tiles [begin, end) that hold the keys.
DEVICE Range tiles_of(Range keys) {
  if (keys.begin >= keys.end) return {0, 0};
  return {keys.begin / tile_kv, (keys.end + tile_kv - 1) / tile_kv};
}
DEVICE Range keys_of_rows(const Args& args, const Sequence& seq, i32 i0, i32 i1) {
  i1 = smallest(i1, seq.len_q);
  return i0 < i1 ? visible_keys(args, seq, i0, i1 - 1) : Range{0, 0};
}

// Is block (own, walked) of the stage's tile kept?  Both count from the tile's first block.
template <class Kept> DEVICE bool keeps(Kept& smem, int stage, int own, int walked) {
  return smem.kept_blocks(stage * Walk::Shape::n_own + own, walked / 32) >> walked % 32 & 1;
}

DEVICE void init_barriers(Smem& smem) {
#pragma unroll
  for (int s = 0; s < n_stages; ++s) {
    mbarrier_init(smem.K_full.address(0, s), asks_blocks ? 32 : 1);   // lanes that write kept blocks
    mbarrier_init(smem.V_full.address(0, s), 1);
    mbarrier_init(smem.K_empty.address(0, s), n_readers);
    mbarrier_init(smem.V_empty.address(0, s), n_groups);
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    mbarrier_init(smem.work_full.address(0, s), n_announcers);
    mbarrier_init(smem.work_empty.address(0, s), n_threads);
  }
#pragma unroll
  for (int s = 0; s < q_stages; ++s) {
    mbarrier_init(smem.Q_full.address(0, s), 1);
    mbarrier_init(smem.Q_empty.address(0, s), n_groups);
  }
  mbarrier_init(smem.V_landed.address(0, 0), 1);
  mbarrier_init(smem.O_read.address(0, 0), n_groups);
  mbarrier_init_fence();
}
