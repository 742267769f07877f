// blocks.cuh - from a block-level CSR mask to the tiles a kernel visits, for any tile and any block size.
// A kernel owns a tile along one axis and walks tiles along the other.
// Forward: owns queries, walks keys, args.blocks.   Backward: owns keys, walks queries, args.blocks_of_key.
#pragma once
#include "args.cuh"
#include "memory.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr i32 NO_TILE = 0x7fffffff;

template <int own_tile, int walk_tile, int own_block, int walk_block> struct BlockShape {
  static constexpr int n_own = (own_tile + own_block - 2) / own_block + 1;   // blocks that a tile can touch
  static constexpr int n_walk = (walk_tile + walk_block - 2) / walk_block + 1;
  static constexpr int n_words = (n_walk + 31) / 32;
  static constexpr int rows_per_lane = (n_own + 31) / 32;
  // A tile that lies inside one block is kept or skipped whole: nobody asks about its elements.
  static constexpr bool tiles_are_whole = own_block % own_tile == 0 && walk_block % walk_tile == 0;
};

// Every warp holds the same state: lane r follows own blocks r, r + 32, ..., each a cursor into its CSR row.
// All lanes call all functions.
template <int own_tile, int walk_tile, int own_block, int walk_block> struct BlockWalk {
  using Shape = BlockShape<own_tile, walk_tile, own_block, walk_block>;
  static constexpr int own_block_rows = own_block, block = walk_block;
  Global<i32> indices;
  i32 own_first;                       // block of the tile's first row
  i32 cursor[Shape::rows_per_lane];    // first kept block that does not end before the walk's position
  i32 end[Shape::rows_per_lane];

  // own0, own1: rows of the tile; walk0: where the walk begins.
  DEVICE BlockWalk(const BlockRows& rows, i64 b, i64 h, i32 own0, i32 own1, i32 walk0, int lane)
      : indices(rows.indices) {
    const Global<i32> indptr(rows.indptr);
    own_first = own0 / own_block;
#pragma unroll
    for (int n = 0; n < Shape::rows_per_lane; ++n) {
      const i32 row = own_first + lane + 32 * n;
      cursor[n] = end[n] = 0;
      if (has_block_mask && own0 < own1 && row <= (own1 - 1) / own_block) {
        const i64 at = b * rows.batch + h * rows.head + row;
        cursor[n] = indptr.load(at);
        end[n] = indptr.load(at + 1);
        for (i32 low = cursor[n], high = end[n]; low < high; cursor[n] = low) {   // first block from walk0 on
          const i32 middle = low + (high - low) / 2;
          if (indices.load(middle) < walk0 / walk_block) low = middle + 1;
          else high = middle;
        }
      }
    }
  }

  // First tile start (a multiple of walk_tile) at or after `position`, itself a tile start, that holds a kept
  // block; NO_TILE: there is none.
  DEVICE i32 next(i32 position) {
    i64 nearest = NO_TILE;
#pragma unroll
    for (int n = 0; n < Shape::rows_per_lane; ++n) {
      i64 start = NO_TILE;
      while (cursor[n] < end[n]) {
        start = static_cast<i64>(indices.load(cursor[n])) * walk_block;
        if (start + walk_block > position) break;
        start = NO_TILE;
        ++cursor[n];
      }
      nearest = smallest(nearest, start);
    }
    i32 first = static_cast<i32>(smallest<i64>(nearest, NO_TILE));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) first = smallest(first, shfl_xor(first, step));
    return first == NO_TILE ? NO_TILE : largest(position, first / walk_tile * walk_tile);
  }
};

// The kept blocks of one tile, or one per stage, as bits: a base of struct Smem, empty when no element is
// ever asked.
template <class Walk, bool is_needed, int stages = 1> struct KeptBlocks {
  Shared<u32, stages * Walk::Shape::n_own, Walk::Shape::n_words> kept_blocks;

  // Of the tile at walk0, which next() has just returned.  One warp writes, the others read after a
  // block_sync.
  DEVICE void fill_blocks(const Walk& walk, i32 walk0, int lane, int stage = 0) {
#pragma unroll
    for (int n = 0; n < Walk::Shape::rows_per_lane; ++n) {
      const int row = lane + 32 * n;
      i32 at = walk.cursor[n];
      for (int word = 0; word < Walk::Shape::n_words && row < Walk::Shape::n_own; ++word) {
        u32 bits = 0;
        for (; at < walk.end[n]; ++at) {
          const i32 place = walk.indices.load(at) - walk0 / Walk::block - 32 * word;
          if (place >= 32) break;
          bits |= 1u << place;   // place >= 0: the cursor stands at or after the tile's first block
        }
        kept_blocks(stage * Walk::Shape::n_own + row, word) = bits;
      }
    }
  }

  // Is the block of (own, at) kept?  own: row of the owned tile, at: row of the tile at walk0.
  DEVICE bool keeps(const Walk& walk, i32 own, i32 walk0, i32 at, int stage = 0) {
    const i32 place = at / Walk::block - walk0 / Walk::block;
    const int row = stage * Walk::Shape::n_own + own / Walk::own_block_rows - walk.own_first;
    return kept_blocks(row, place / 32) >> (place % 32) & 1;
  }
};
template <class Walk, int stages> struct KeptBlocks<Walk, false, stages> {
  DEVICE void fill_blocks(const Walk&, i32, int, int = 0) {}
  DEVICE bool keeps(const Walk&, i32, i32, i32, int = 0) { return true; }
};
