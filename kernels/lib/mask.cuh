// mask.cuh - is key j visible to query i?  Positions (causal, window, lengths) AND the boolean mask.
// The block mask is blocks.cuh's.
#pragma once
#include "positions.cuh"

// Must every element be asked, whatever its position?
constexpr bool masks_every_tile = has_mask;

// What the rows of one (sequence, head) share.
struct Masking {
  i64 mask0;   // index of mask (i = 0, j = 0)
};

DEVICE Masking masking_of(const Args& args, const Sequence& seq, i64 h) {
  Masking m = {};
  if constexpr (has_mask) m.mask0 = seq.b * args.mask.batch + h * args.mask.head;
  return m;
}

// keys = visible_keys(args, seq, i), computed once per row and not once per element.
DEVICE bool visible(const Args& args, const Masking& m, Range keys, i32 i, i32 j) {
  if (j < keys.begin || j >= keys.end) return false;
  if constexpr (!has_mask) return true;
  return Global<u8>(args.mask.data).load(m.mask0 + i * args.mask.row + j * args.mask.col) != 0;
}

// Is every (i, j) of rows [i0, i1) and keys [j0, j1) visible, and does it exist?  Then the tile needs no test
// and may read bias anywhere.  Bounds move one way with i: the last row has the latest begin, the first row
// the earliest end.
DEVICE bool is_fully_visible(const Args& args, const Sequence& s, i32 i0, i32 i1, i32 j0, i32 j1) {
  if (masks_every_tile || i1 > last_query(args, s)) return false;
  return visible_keys(args, s, i1 - 1).begin <= j0 && j1 <= visible_keys(args, s, i0).end;
}
