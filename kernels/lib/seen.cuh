// seen.cuh - which keys the rows of a tile see: all that some row sees are read, those that all see need no
// tests.
#pragma once
#include "heads_together.cuh"

// Keys that some of the rows [first, end) see.
DEVICE Range some_see(const Args& args, const Sequence& seq, i32 first, i32 end) {
  return first < end ? visible_keys(args, seq, query_of(first), query_of(end - 1)) : Range{0, 0};
}
// Keys that all of them see.  asks_blocks: a block mask hides elements of tiles.
template <bool asks_blocks>
DEVICE Range all_see(const Args& args, const Sequence& seq, i32 first, i32 end) {
  if (masks_every_tile || asks_blocks || first >= end || query_of(end - 1) >= last_query(args, seq))
    return {0, 0};
  return {visible_keys(args, seq, query_of(end - 1)).begin, visible_keys(args, seq, query_of(first)).end};
}
