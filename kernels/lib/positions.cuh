// positions.cuh - which sequence and rows a block owns, and which keys a row may see by position.
// Positions inside a sequence are 32-bit (plan.py refuses longer ones); what is added to a pointer is 64-bit.
#pragma once
#include "args.cuh"
#include "memory.cuh"
#include "types.cuh"

// What launch.py writes for a window side of None; query_offset is clamped to +-2^61.
constexpr i64 UNBOUNDED = 1ll << 61;

// Where a number stands in its array.
DEVICE i64 index_of(const PerHead& a, i64 b, i64 h) { return b * a.batch + h * a.head; }
DEVICE i64 index_of(const PerRow& a, i64 b, i64 h, i64 row) { return b * a.batch + h * a.head + row * a.row; }
DEVICE i64 index_of(const Tensor& a, i64 b, i64 h, i64 row) { return b * a.batch + h * a.head + row * a.row; }

// One sequence: where its rows lie in the arrays, and how many of them carry numbers.
struct Sequence {
  i64 b;         // its entry in options with a batch axis: bias, mask, slopes, blocks, dropout
  i64 array_b;   // its index on the arrays' batch axis: 0 when packed
  i64 q_row0;    // its first row in Q, O, dO, dQ, lse, delta
  i64 k_row0;    // its first row in K, V, dK, dV
  i32 rows_q;    // rows it owns: outputs are written for all of them
  i32 rows_k;
  i32 len_q;     // rows that exist; those from len_q to rows_q get out 0, lse -inf, gradients 0
  i32 len_k;
  i64 offset;    // query i stands at key position i + offset
};

// Keys [begin, end) or queries [begin, end).
struct Range {
  i32 begin;
  i32 end;
};

DEVICE i64 read_length(const Lengths& lengths, i64 index) {
  if (lengths.bytes == 8) return Global<i64>(lengths.data).load(index * lengths.stride);
  return Global<i32>(lengths.data).load(index * lengths.stride);
}

DEVICE i32 valid_rows(const Lengths& lengths, i64 b, i64 rows) {
  return static_cast<i32>(clamp<i64>(read_length(lengths, b), 0, rows));
}

// Cumulative lengths, clamped to the array; the first sequence starts at row 0 whatever entry 0 says.
DEVICE i64 cumulative(const Lengths& cu_seqlens, i64 index, i64 tokens) {
  return index == 0 ? 0 : clamp<i64>(read_length(cu_seqlens, index), 0, tokens);
}

// Sequence b.  Packed: b = args.batch is the tail, the rows past the last cumulative length: none of them
// exists.
DEVICE Sequence sequence_of(const Args& args, i64 b) {
  Sequence s;
  s.b = b;
  if constexpr (is_packed) {
    const bool is_tail = b >= args.batch;
    s.array_b = 0;
    s.q_row0 = cumulative(args.cu_seqlens_q, b, args.len_q);
    s.k_row0 = cumulative(args.cu_seqlens_k, b, args.len_k);
    const i64 q_end = is_tail ? args.len_q : cumulative(args.cu_seqlens_q, b + 1, args.len_q);
    const i64 k_end = is_tail ? args.len_k : cumulative(args.cu_seqlens_k, b + 1, args.len_k);
    s.rows_q = static_cast<i32>(largest<i64>(q_end - s.q_row0, 0));
    s.rows_k = static_cast<i32>(largest<i64>(k_end - s.k_row0, 0));
    s.len_q = is_tail ? 0 : s.rows_q;
    s.len_k = is_tail ? 0 : s.rows_k;
  } else {
    s.array_b = b;
    s.q_row0 = 0;
    s.k_row0 = 0;
    s.rows_q = static_cast<i32>(args.len_q);
    s.rows_k = static_cast<i32>(args.len_k);
    s.len_q = s.rows_q;
    s.len_k = s.rows_k;
    if constexpr (has_query_lengths) s.len_q = valid_rows(args.query_lengths, b, args.len_q);
    if constexpr (has_key_lengths) s.len_k = valid_rows(args.key_lengths, b, args.len_k);
  }
  s.offset = args.offset_is_given ? args.query_offset : static_cast<i64>(s.len_k) - s.len_q;
  return s;
}

// Rows of the arrays' batch entry b that exist; packed: tokens that belong to a sequence.
DEVICE i64 existing_rows(const Args& args, i64 b) {
  if constexpr (is_packed) return cumulative(args.cu_seqlens_q, args.batch, args.len_q);
  if constexpr (has_query_lengths) return clamp<i64>(read_length(args.query_lengths, b), 0, args.len_q);
  return args.len_q;
}

// ---- packed grids: block -> (sequence, tile) without a maximum length and without a prefix sum.
// The tiles of sequence b take slots from floor(cu[b] / tile) + b on.  ceil((c1 - c0) / tile) is at most
// floor(c1 / tile) - floor(c0 / tile) + 1, so slots never overlap, and their starts grow with b: a binary
// search finds the owner.  A few slots stay empty.
// Slots in all: floor(tokens / tile) + batch + 1, the last sequence being the tail.
struct Slot {
  i64 b;
  i32 tile;   // may lie past the last tile of the sequence: then the block has nothing to do
};

DEVICE Slot slot_owner(const Args& args, const Lengths& cu_seqlens, i64 tokens, i64 slot, i32 tile_rows) {
  i64 low = 0, high = args.batch;   // the owner is in [low, high]
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (cumulative(cu_seqlens, middle, tokens) / tile_rows + middle <= slot) low = middle;
    else high = middle - 1;
  }
  return {low, static_cast<i32>(slot - cumulative(cu_seqlens, low, tokens) / tile_rows - low)};
}

// Blocks per head for tiles of `tile_rows` out of `rows` (packed: tokens); the same number in cuflash/row.py.
DEVICE i64 n_slots(const Args& args, i64 rows, i32 tile_rows) {
  return is_packed ? rows / tile_rows + args.batch + 1 : ceil_div(rows, tile_rows) * args.batch;
}

// What one block of a query-tile grid owns.  x = head + heads * slot, so that blocks of one moment share K
// and V of a group; among the slots of a sequence the last tile comes first: with causal it is the heaviest,
// and the light ones fill the end.
struct QueryTile {
  Sequence seq;
  i64 h;        // query head
  i64 h_k;      // its key head
  i32 i0;       // first row
  bool exists;  // false: nothing to do
};

DEVICE QueryTile query_tile_of(const Args& args, i64 x, i32 tile_rows) {
  QueryTile t;
  t.h = x % args.heads;
  t.h_k = t.h / (args.heads / args.heads_k);
  const i64 slot = x / args.heads;
  i64 tile;
  if constexpr (is_packed) {
    const Slot owner = slot_owner(args, args.cu_seqlens_q, args.len_q, slot, tile_rows);
    t.seq = sequence_of(args, owner.b);
    const i64 n_tiles = ceil_div(t.seq.rows_q, tile_rows);
    t.exists = owner.tile < n_tiles;
    tile = n_tiles - 1 - owner.tile;
  } else {
    const i64 n_tiles = ceil_div(args.len_q, tile_rows);
    t.seq = sequence_of(args, slot % args.batch);   // slow axis: the tile, heaviest of all first
    t.exists = true;
    tile = n_tiles - 1 - slot / args.batch;
  }
  t.i0 = static_cast<i32>(tile) * tile_rows;
  return t;
}

// What one block of a key-tile grid owns, for one query head (heads = args.heads) or key head (args.heads_k).
// The first key tile is the heaviest with causal, so tiles go up.
struct KeyTile {
  Sequence seq;
  i64 h;        // of the `heads` asked for
  i32 j0;       // first row
  bool exists;
};

DEVICE KeyTile key_tile_of(const Args& args, i64 x, i32 tile_rows, i64 heads) {
  KeyTile t;
  t.h = x % heads;
  const i64 slot = x / heads;
  if constexpr (is_packed) {
    const Slot owner = slot_owner(args, args.cu_seqlens_k, args.len_k, slot, tile_rows);
    t.seq = sequence_of(args, owner.b);
    t.exists = owner.tile < ceil_div(t.seq.rows_k, tile_rows);
    t.j0 = owner.tile * tile_rows;
  } else {
    t.seq = sequence_of(args, slot % args.batch);
    t.exists = true;
    t.j0 = static_cast<i32>(slot / args.batch) * tile_rows;
  }
  return t;
}

// ---- visible by position: causal, window, lengths, and in packed calls the extent of bias and mask

// One past the last key that any row may see, one past the last query that may see any key.
DEVICE i32 last_key(const Args& args, const Sequence& s) {
  i64 end = s.len_k;
  if constexpr (is_packed && has_bias) end = smallest(end, args.bias.cols);
  if constexpr (is_packed && has_mask) end = smallest(end, args.mask.cols);
  return static_cast<i32>(end);
}
DEVICE i32 last_query(const Args& args, const Sequence& s) {
  i64 end = s.len_q;
  if constexpr (is_packed && has_bias) end = smallest(end, args.bias.rows);
  if constexpr (is_packed && has_mask) end = smallest(end, args.mask.rows);
  return static_cast<i32>(end);
}

// Keys that at least one of the rows [i_first, i_last] may see; with one row, exactly its keys.
DEVICE Range visible_keys(const Args& args, const Sequence& s, i32 i_first, i32 i_last) {
  const i64 limit = i_first < last_query(args, s) ? last_key(args, s) : 0;
  i64 begin = 0, end = limit;
  if constexpr (has_window) begin = i_first + s.offset - args.window_left;
  if constexpr (has_window) end = smallest(end, i_last + s.offset + args.window_right + 1);
  if constexpr (causal) end = smallest(end, i_last + s.offset + 1);
  begin = clamp<i64>(begin, 0, limit);
  return {static_cast<i32>(begin), static_cast<i32>(largest(begin, end))};
}
DEVICE Range visible_keys(const Args& args, const Sequence& s, i32 i) { return visible_keys(args, s, i, i); }

// Queries to which at least one of the keys [j_first, j_last] may be visible.
DEVICE Range visible_queries(const Args& args, const Sequence& s, i32 j_first, i32 j_last) {
  const i64 limit = j_first < last_key(args, s) ? last_query(args, s) : 0;
  i64 begin = 0, end = limit;
  if constexpr (has_window) begin = j_first - s.offset - args.window_right;
  if constexpr (causal) begin = largest(begin, j_first - s.offset);
  if constexpr (has_window) end = smallest(end, j_last - s.offset + args.window_left + 1);
  begin = clamp<i64>(begin, 0, limit);
  return {static_cast<i32>(begin), static_cast<i32>(largest(begin, end))};
}
