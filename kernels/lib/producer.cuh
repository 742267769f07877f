// producer.cuh - the shared memory of a persistent forward kernel, and the warp that fills it.   sm_90a
//
// The warp takes query tiles (lib/work.cuh), announces each to the consumers, and copies its Q, then K and V
// of every key tile that some row may see, K one tile ahead of V: the order in which they are used.  It runs
// ahead of the consumers, into the next query tile too, as far as stages are empty.
// All 32 lanes walk, lane 0 waits and acts: one that waited for itself could miss two phases of a barrier.
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
  Shared<Work, 1, 2> work;        // what the producer chose; i0 = NO_WORK: the end
  Shared<i32, 1, n_stages> j0;    // has_block_mask: the first key of the stage's tile, NO_TILE: no more
  Shared<u64, 1, n_stages> K_full, K_empty, V_full, V_empty;
  Shared<u64, 1, 2> work_full, work_empty;
  Shared<u64, 1, q_stages> Q_full, Q_empty;
  Shared<u64, 1, 1> V_landed;
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, n_stages> {};
static_assert(n_stages >= 2, "producer: K is one tile ahead of V");
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

struct Producer {
  const MappedArgs& args;
  Smem& smem;
  const int lane;
  Ring<n_stages> K_at, V_at;
  Ring<2> work_at;
  Ring<q_stages> Q_at;
  Ring<1> landed_at;
  u32 x;   // number of the tile in work

  DEVICE void run() {
    Work work = taken(blockIdx.x);
    while (true) {
      if (lane == 0) {
        work_at.wait_empty(smem.work_empty);   // consumers are done with the tile before the last
        smem.work(0, work_at.stage) = work;
        mbarrier_arrive(smem.work_full.address(0, work_at.stage));
      }
      work_at.next();
      if (work.i0 == NO_WORK) break;
      load(query_tile_of(args, work));
      work = taken(next_of(ask()));   // not before: who takes a tile early keeps others from it
    }
  }

  // The x-th tile, or the next that exists.
  DEVICE Work taken(u32 first) {
    const u32 n = n_work(args, tile_q);
    Work work = {0, 0, 0, NO_WORK};
    for (x = first; x < n; x = next_of(ask())) {
      work = work_of<elem>(args, x, tile_q);
      if (work.i0 != NO_WORK) break;
    }
    return work;
  }
  DEVICE u32 ask() {
    if (asks_for_work && lane == 0) return Global<u32>(args.workspace[0]).fetch_add(0, 1);
    return 0;
  }
  DEVICE u32 next_of(u32 asked) {   // asked: what ask() gave
    return (asks_for_work ? shfl(asked, 0) : x) + gridDim.x;
  }

  DEVICE void load(const QueryTile& own) {
    const Range keys = keys_of_rows(args, own.seq, own.i0, own.i0 + tile_q);
    const Range tiles = tiles_of(keys);
    const i32 i1 = smallest(own.i0 + tile_q, own.seq.len_q);
    Walk walk(args.blocks, own.seq.b, own.h, own.i0, i1, keys.begin, lane);
    const auto next_tile = [&](i32 after) {   // -1: the first
      if constexpr (has_block_mask) {
        const i32 j0 = walk.next(after < 0 ? tiles.begin * tile_kv : after + tile_kv);
        return j0 < keys.end ? j0 : NO_TILE;
      }
      const i32 j0 = after < 0 ? (tiles.end - 1) * tile_kv : after - tile_kv;
      return j0 >= tiles.begin * tile_kv ? j0 : NO_TILE;
    };
    if (tiles.begin == tiles.end) return;
    if (lane == 0) {
      Q_at.wait_empty(smem.Q_empty);   // every consumer has used the Q that was here
      const u32 full = smem.Q_full.address(0, Q_at.stage);
      mbarrier_arrive_expect(full, smem.Q[0].n_bytes);
      smem.Q[Q_at.stage].load(args.maps.Q, full, static_cast<i32>(own.seq.q_row0) + own.i0, own.h,
                              own.seq.array_b);
    }
    Q_at.next();
    i32 before = NO_TILE;   // K runs one tile ahead of V, as the consumers do
    for (i32 j0 = next_tile(-1);; j0 = next_tile(j0)) {
      if (j0 != NO_TILE || has_block_mask) load_K(own, walk, j0);
      if (before != NO_TILE) load_V(own, before);
      before = j0;
      if (j0 == NO_TILE) break;
    }
  }

  DEVICE void load_K(const QueryTile& own, const Walk& walk, i32 j0) {
    const u32 full = smem.K_full.address(0, K_at.stage);
    if (lane == 0) K_at.wait_empty(smem.K_empty);   // every consumer has multiplied by the tile that was here
    if (asks_blocks && j0 != NO_TILE) {
      warp_sync();   // the stage is empty: its kept blocks may be written
      smem.fill_blocks(walk, j0, lane, K_at.stage);
      warp_sync();   // they are: lane 0 may announce them
    }
    if (lane == 0) {
      if (has_block_mask) smem.j0(0, K_at.stage) = j0;
      if (j0 == NO_TILE) {
        mbarrier_arrive(full);
      } else {
        mbarrier_arrive_expect(full, smem.K[0].n_bytes);
        smem.K[K_at.stage].load(args.maps.K, full, static_cast<i32>(own.seq.k_row0) + j0, own.h_k,
                                own.seq.array_b);
      }
    }
    K_at.next();
  }

  DEVICE void load_V(const QueryTile& own, i32 j0) {
    auto& V = smem.V[V_at.stage];
    const u32 full = smem.V_full.address(0, V_at.stage);
    const bool mends = reads_past_end && j0 + tile_kv > own.seq.len_k;
    const u32 landed = mends ? smem.V_landed.address(0, 0) : full;
    if (lane == 0) {
      V_at.wait_empty(smem.V_empty);   // every consumer has multiplied by the tile that was here
      mbarrier_arrive_expect(landed, V.n_bytes);
      V.load(args.maps.V, landed, static_cast<i32>(own.seq.k_row0) + j0, own.h_k, own.seq.array_b);
    }
    if (mends) {   // rows of others meet weights of 0, and 0 x NaN is NaN
      if (lane == 0) landed_at.wait_full(smem.V_landed);   // the tile is there, as it came
      warp_sync();                                         // as above, for all lanes
      landed_at.next();
      V.clear_rows(own.seq.len_k - j0, lane, 32);
      fence_async_shared();
      warp_sync();   // all lanes have cleared theirs: lane 0 may announce the tile
      if (lane == 0) mbarrier_arrive(full);
    }
    V_at.next();
  }
};
