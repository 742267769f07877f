// query_tiles.cuh - what a Hopper backward keeps per query tile in the workspace, padded to whole tiles.
//
// A query tile is TILE_Q queries of one sequence and head.  Its place is its number in two arrays:
//   rows    float [places + 1, 2, TILE_Q]        lse, then delta, of each query: one bulk copy a tile; the
//                                                last place is counters
//   dQ      float [places, TILE_Q * HEAD_DIM]    the sum of dS K, in the order of accumulators
// lse is in base 2 (times log2(e)) where only scale stands between a product and its score, natural else,
// where the weights must be nearer to the truth; +inf where a query attends to nothing or does not exist:
// its weights e^(score - lse) are then 0 without a test.
//
// The order of dQ: a warp's accumulator of 16 queries and 8 columns is 128 numbers side by side, lane after
// lane, so that one instruction of a warp adds to 512 neighbouring bytes.  Piece (r, c), of queries 16 r and
// columns 8 c on, is piece r * HEAD_DIM / 8 + c.
//
// dout of another dtype than Q: dO_tiles, elem [dO_parts, places, TILE_Q * HEAD_DIM_V], holds it in 16
// bits, as the panels of a PanelTile lie in shared memory; then what those lose of it, which dP needs too.
//
// deterministic, and bwd_06_specialize in short walks: blocks of keys add to a tile one after the other, the
// last keys first.  Blocks start in that order too (key_rows.cuh), and with causal the last keys meet a tile
// first: nobody waits for long.  turns, i32 [places, 2], counts how many have added; the second number is for
// the second warpgroup of a block (bwd_05_wgmma) or block of a cluster.
#pragma once
#include "barrier.cuh"
#include "positions.cuh"

// Of the workspace; 0, 1: as in bwd_02_tiled.cu.
constexpr int SLOT_ROWS = 2, SLOT_DQ = 3, SLOT_DO = 4, SLOT_TURNS = 5;
// bwd_06_specialize: blocks add to a query tile in turn, and the first stores.  Where every query sees a key,
// the last makes dq of the sum.
#ifndef CUFLASH_IN_TURN
#define CUFLASH_IN_TURN 0
#define CUFLASH_FINISHES 0
#endif
constexpr bool in_turn = CUFLASH_IN_TURN;
constexpr bool finishes = CUFLASH_FINISHES;
// With causal the longest walks would end the kernel so.  In the last heads they come first: those blocks
// walk from the last query to the first, the first keys are the first in turn, and the diagonal is the last.
constexpr bool may_turn = finishes && causal && !has_block_mask;
#undef CUFLASH_IN_TURN
#undef CUFLASH_FINISHES
constexpr bool is_plain = !has_softcap && !has_alibi && !has_bias;   // only scale makes a score of a product
constexpr bool converts_dO = !is_same<dout_elem, elem>;
// 16 bits each.  Slopes are summed over so many scores that all of float32's bits count: three times
// bfloat16's.
constexpr int dO_parts = !converts_dO ? 1 : wants_dalibi && is_same<elem, bf16> ? 3 : 2;

// Query tiles of a head, over all sequences when packed.
DEVICE i64 places_per_head(const Args& args) {
  return is_packed ? n_slots(args, args.len_q, tile_q) : ceil_div(args.len_q, tile_q);
}

DEVICE i64 all_places(const Args& args) {
  return places_per_head(args) * args.heads * (is_packed ? 1 : args.batch);
}

// Where blocks ask for the next tile of keys: an i32 behind the rows of the last place; then counters of
// key_pieces.cuh.  __open sets all 2 * TILE_Q to 0.
DEVICE i64 counter_index(const Args& args) { return all_places(args) * 2 * tile_q; }

// The place of the tile at row i0 of head h.  Fewer than 2^31: they are the blocks of a grid.
DEVICE i32 place_of(const Args& args, const Sequence& seq, i64 h, i32 i0) {
  const u32 per_head = static_cast<u32>(places_per_head(args)), tile = static_cast<u32>(i0) / tile_q;
  if constexpr (is_packed)
    return static_cast<i32>(static_cast<u32>(h) * per_head + static_cast<u32>(seq.q_row0) / tile_q +
                            static_cast<u32>(seq.b) + tile);
  return static_cast<i32>(static_cast<u32>(seq.b * args.heads + h) * per_head + tile);
}

// The tile at a place: the reverse.
DEVICE QueryTile query_tile_at(const Args& args, i64 place) {
  QueryTile t = {};
  // 32 bits are divided sooner.
  const u32 at = static_cast<u32>(place), per_head = static_cast<u32>(places_per_head(args));
  const u32 head = at / per_head, heads = static_cast<u32>(args.heads);
  const i64 slot = at - head * per_head;
  t.h = head % heads;
  if constexpr (is_packed) {
    const Slot owner = slot_owner(args, args.cu_seqlens_q, args.len_q, slot, tile_q);
    t.seq = sequence_of(args, owner.b);
    t.i0 = owner.tile * tile_q;
    t.exists = t.i0 < t.seq.rows_q;
  } else {
    t.seq = sequence_of(args, head / heads);
    t.i0 = static_cast<i32>(slot) * tile_q;
    t.exists = true;
  }
  t.h_k = static_cast<u32>(t.h) / (heads / static_cast<u32>(args.heads_k));
  return t;
}

// First number of piece (r, c) for this lane: 4 numbers, queries lane / 4 and + 8, columns 2 (lane % 4), + 1.
DEVICE i64 dQ_index(i64 place, int r, int c, int lane) {
  return place * (tile_q * head_dim_tile) + (r * (head_dim_tile / 8) + c) * 128 + lane * 4;
}

// How many blocks add to the tile at i0 before the one of the keys at j0.
DEVICE i32 turn_of(const Args& args, const Sequence& seq, i32 i0, i32 j0, bool turned = false) {
  if (may_turn && turned) return j0 / tile_kv;
  const i32 last = smallest(i0 + tile_q, last_query(args, seq)) - 1;
  return (visible_keys(args, seq, i0, last).end - 1) / tile_kv - j0 / tile_kv;
}

// in_turn: the block of the keys at j0 has the first turn at query tiles that end at query `first` or before;
// finishes: the last at those that end at `last` or before.
struct Ends {
  i32 first, last;
  DEVICE Ends(const Args& args, const Sequence& seq, i32 j0, bool turned) : first(0), last(0) {
    if constexpr (in_turn) {
      const i32 next = j0 + tile_kv;
      const i32 last_keys =
          next < last_key(args, seq) ? visible_queries(args, seq, next, next).begin : seq.len_q;
      const i32 first_keys = finishes && j0 == 0 ? seq.len_q : 0;
      first = may_turn && turned ? first_keys : last_keys;
      last = may_turn && turned ? last_keys : first_keys;
    }
  }
};
DEVICE bool ends_until(const Args& args, const Sequence& seq, i32 i0, i32 until) {
  return smallest(i0 + tile_q, last_query(args, seq)) <= until;
}

// The turns of one warpgroup.  What it added is announced when it waits for the next tile: by then the
// additions have long arrived, and the fence of the announcement costs nothing.
struct Turns {
  Global<i32> turns;
  int group, thread;   // of the warpgroup, in it
  i64 added;           // counter of the tile added to last, -1: none

  DEVICE Turns(const Args& args, int group, int thread)
      : turns(args.workspace[SLOT_TURNS]), group(group), thread(thread), added(-1) {}
  DEVICE void announce() {
    barrier_sync(2 + group, 128);   // all threads of the group have added
    if (thread == 0 && added >= 0) turns.add_release(added, 1);
  }
  DEVICE void wait(i64 place, i32 turn) {
    announce();
    added = place * 2 + group;
    if (thread == 0) turns.wait_for(added, turn);
    barrier_sync(2 + group, 128);   // it is this group's turn
  }
};
