// planner.cuh - the warp that says which query tile a persistent block takes next.   sm_90a
//
// It takes a number (lib/work.cuh), and finds which key tiles each consumer's rows see: arithmetic for which
// nobody else waits.  When it may take the next one the producer says: not long before the end of the one in
// work, because who takes a tile early keeps others from it.
#pragma once
#include "persistent_block.cuh"

// Of the tiles in `mine`, those that all 64 rows from i0 on see as a whole.
DEVICE Range plain_tiles(const Args& args, const Sequence& seq, i32 i0, Range mine) {
  const i32 i1 = smallest(i0 + 64, seq.len_q);
  Range plain = {mine.begin, mine.begin};
  if (masks_every_tile || asks_blocks || i0 >= i1) return plain;
  if (has_bias && i0 + 64 > last_query(args, seq)) return plain;   // rows that do not exist have no bias
  const i32 begin = visible_keys(args, seq, i1 - 1).begin, end = visible_keys(args, seq, i0).end;
  plain.begin = clamp((begin + tile_kv - 1) / tile_kv, mine.begin, mine.end);
  plain.end = clamp(end / tile_kv, plain.begin, mine.end);
  return plain;
}

// keys <- those of a group's rows.
DEVICE void find_key_tiles(const Args& args, const QueryTile& own, int group, KeyTiles& keys) {
  const i32 i0 = own.i0 + 64 * group;
  const Range all = tiles_of(keys_of_rows(args, own.seq, own.i0, own.i0 + tile_q));
  keys.all = all;
  Range mine = tiles_of(keys_of_rows(args, own.seq, i0, i0 + 64));
  if (mine.begin == mine.end) mine = {all.begin, all.begin};
  keys.mine = mine;
  keys.plain = plain_tiles(args, own.seq, i0, mine);
}

struct Planner {
  const MappedArgs& args;
  Smem& smem;
  const int lane;
  Ring<2> work_at;
  u32 x = 0;   // number of the tile

  DEVICE void run() {
    for (x = blockIdx.x;; x = next()) {
      const Work work = taken();
      announce(work);
      if (work.i0 == NO_WORK) break;
      barrier_sync(MAY_PLAN, 64);   // the producer has come to this tile's end
    }
  }

  // The x-th tile, or the next that exists.
  DEVICE Work taken() {
    const u32 n = n_work(args, tile_q);
    for (; x < n; x = next()) {
      const Work work = work_of<elem>(args, x, tile_q);
      if (work.i0 != NO_WORK) return work;
    }
    return {0, 0, 0, NO_WORK};
  }
  DEVICE u32 next() {
    if constexpr (!asks_for_work) return x + gridDim.x;
    u32 asked = 0;
    if (lane == 0) asked = Global<u32>(args.workspace[0]).fetch_add(0, 1);
    return shfl(asked, 0) + gridDim.x;
  }

  // Lanes that write wait and arrive themselves: one for another would be right too, but no tool could tell.
  DEVICE void announce(const Work& work) {
    if (lane < n_announcers) {
      work_at.wait_empty(smem.work_empty);   // consumers are done with the tile before the last
      if (lane == 0) smem.work(0, work_at.stage) = work;
      if (plans && work.i0 != NO_WORK)
        find_key_tiles(args, query_tile_of(args, work), lane, smem.keys(lane, work_at.stage));
      mbarrier_arrive(smem.work_full.address(0, work_at.stage));
    }
    warp_sync();   // together again
    work_at.next();
  }
};
