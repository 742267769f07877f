// mma_gradient.cuh - the backward between its products on tensor cores: P and dS, as a warp holds them.
#pragma once
#include "barrier.cuh"
#include "gradient.cuh"
#include "shares.cuh"

// ---- P and dS

// Nothing but the scale changes a score: P is one multiply-add and one exponential, in base 2.
constexpr bool is_plain = !has_softcap && !has_alibi && !has_bias && !has_dropout && sizeof(elem) == 2;

// What the rows of a query tile give to all their scores: lse (where is_plain pass_delta has made it base 2,
// and +inf for a row that attends to nothing; else as given) and delta.  Zeros for rows that do not exist:
// their Q and dO are zeros too, and so is dS, whatever P is.
template <int stages> struct TileNumbers {
  Shared<float, stages, tile_q> lse;
  Shared<float, stages, tile_q> delta;

  // Of rows i0 .. of query head h.  Asked for by cp.async (the caller commits) or loaded.
  template <bool is_async>
  DEVICE void load(const Args& args, const Sequence& seq, i64 h, i32 i0, int stage, int thread) {
    if (thread >= tile_q) return;
    const PerRow& rows = is_plain ? args.lse_log2 : args.lse;
    const i64 row = seq.q_row0 + i0 + thread;
    const bool exists = i0 + thread < seq.len_q;
    const Global<float> from(rows.data), deltas(args.delta.data);
    const i64 at = index_of(rows, seq.array_b, h, row), at_delta = index_of(args.delta, seq.array_b, h, row);
    if constexpr (is_async) {
      const u32 n_bytes = exists ? 4 : 0;
      cp_async<4>(lse.address(stage, thread), from.address(at, n_bytes), n_bytes);
      cp_async<4>(delta.address(stage, thread), deltas.address(at_delta, n_bytes), n_bytes);
    } else {
      lse(stage, thread) = exists ? from.load(at) : 0.f;
      delta(stage, thread) = exists ? deltas.load(at_delta) : 0.f;
    }
  }
  // Two neighbouring rows from `row` on.
  DEVICE Pack<float, 2> lse_of(int stage, int row) {
    Pack<float, 2> pair = lse.template as<Pack<float, 2>>(stage, row);
    if constexpr (!is_plain)
      for (int e = 0; e < 2; ++e)   // gradient_of wants +inf where a row attends to nothing
        if (pair.item[e] == NEG_INF) pair.item[e] = -NEG_INF;
    return pair;
  }
  DEVICE Pack<float, 2> delta_of(int stage, int row) { return delta.template as<Pack<float, 2>>(stage, row); }
};

// Bits 2h + e: is the weight of (column e, row half h) of this lane kept?  Philox gives 4 neighbouring keys
// of a query at once: the 4 lanes that hold them make one of their 4 calls each and tell the others.
DEVICE u32 dropout_keeps_piece(const Dropout& dropout, i32 i, i32 j_first, int lane) {
  const int turn = lane / 4 % 4;
  const i32 j = j_first + lane / 16 * 4 + turn / 2 * 8;
  u32 bits = dropout_keeps_4(dropout, i + turn % 2, j) << 4 * turn;
  bits |= shfl_xor(bits, 4);
  bits |= shfl_xor(bits, 8);
  bits >>= turn;
  return (bits & 1) | (bits >> 3 & 2) | (bits >> 6 & 4) | (bits >> 9 & 8);
}

// What is_plain builds do, in three steps.  The first needs no dP, so it runs under the product that makes
// it; the last is for tiles with hidden elements alone.

// S <- P, of columns `first` on.
template <class Part, class Numbers>
DEVICE void weigh(Part& S, Numbers& numbers, int stage, float scale_log2, int first, int warp, int lane) {
#pragma unroll
  for (int c = 0; c < Part::n; ++c) {
    const Pack<float, 2> lse = numbers.lse_of(stage, first + Part::col(warp, lane, c));
#pragma unroll
    for (int a = 0; a < Part::row_blocks; ++a)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S.at[a][c][e] = exp2_approx(S.at[a][c][e] * scale_log2 - lse.item[e % 2]);
  }
}
// dP <- dS.
template <class Part, class Numbers>
DEVICE void differentiate(const Part& P, Part& dP, Numbers& numbers, int stage, int first, int warp,
                          int lane) {
#pragma unroll
  for (int c = 0; c < Part::n; ++c) {
    const Pack<float, 2> delta = numbers.delta_of(stage, first + Part::col(warp, lane, c));
#pragma unroll
    for (int a = 0; a < Part::row_blocks; ++a)
#pragma unroll
      for (int e = 0; e < 4; ++e) dP.at[a][c][e] = P.at[a][c][e] * (dP.at[a][c][e] - delta.item[e % 2]);
  }
}
// P, dS <- 0 where hidden.  i0, j0: of the tiles; is_kept(i, j) is the block mask.
template <class Part, class Kept>
DEVICE void hide(const Args& args, Part& P, Part& dS, const Sequence& seq, const HeadRules& rules, i32 i0,
                 int first, i32 j0, int warp, int lane, Kept is_kept) {
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const i32 j = j0 + Part::row(warp, lane, r);
    const Range queries = visible_queries(args, seq, j, j);
#pragma unroll
    for (int c = 0; c < Part::n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i32 i = i0 + first + Part::col(warp, lane, c) + e;
        const Range keys = {0, i >= queries.begin && i < queries.end ? 0x7fffffff : 0};
        if (!(visible(args, rules.masking, keys, i, j) && is_kept(i, j)))
          P.of_row(r, c, e) = 0, dS.of_row(r, c, e) = 0;
      }
  }
}

// All three for every option.  tests: some element may be hidden.
// visit(r, i, j, d_score): called for every visible element; r is the lane's row.
template <bool tests, class Part, class Numbers, class Kept, class Visit>
DEVICE void share_gradient(const Args& args, Numbers& numbers, int stage, Part& S, Part& dP,
                           const Sequence& seq, const HeadRules& rules, i32 i0, i32 first, i32 j0, int warp,
                           int lane, Kept is_kept, Visit visit) {
  Range queries[Part::n_rows];
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const i32 j = j0 + Part::row(warp, lane, r);
    queries[r] = tests ? visible_queries(args, seq, j, j) : Range{0, 0};
  }
#pragma unroll
  for (int c = 0; c < Part::n; ++c) {
    const int col = first + Part::col(warp, lane, c);
    const Pack<float, 2> lse = numbers.lse_of(stage, col);
    const Pack<float, 2> delta = numbers.delta_of(stage, col);
#pragma unroll
    for (int a = 0; a < Part::row_blocks; ++a) {
      u32 keeps = ~0u;
      if constexpr (has_dropout)
        keeps = dropout_keeps_piece(rules.dropout, i0 + col, j0 + Part::first_row(warp) + 16 * a, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = 2 * a + e / 2;
        const i32 i = i0 + col + e % 2, j = j0 + Part::row(warp, lane, r);
        float &score = S.at[a][c][e], &dscore = dP.at[a][c][e];
        Gradient gradient = {};
        const bool is_inside = !tests || (i >= queries[r].begin && i < queries[r].end);
        const Range keys = {0, is_inside ? 0x7fffffff : 0};
        if (!tests || (visible(args, rules.masking, keys, i, j) && is_kept(i, j))) {
          gradient = gradient_of(args, rules, lse.item[e % 2], delta.item[e % 2], score, dscore,
                                 keeps >> e & 1, i, j);
          visit(r, i, j, gradient.d_score);
        }
        score = gradient.P;
        dscore = gradient.dS;
      }
    }
  }
}

// ---- loads and places

// Tiles that hold dO.  An array of another dtype comes in 16-bit parts, else its rounding would add to that
// of P; in as many as float32 has bits for, where the gradient of the slopes is a float32 sum of dP.
constexpr bool has_own_dO = is_same<dout_elem, elem> || sizeof(elem) == 4;
constexpr int dO_parts = has_own_dO ? 1 : wants_dalibi && is_same<elem, bf16> ? 3 : 2;

// tiles = dO, whatever its dtype, asked for or loaded: each holds what the one before has lost.
template <bool is_async, class Tile>
DEVICE void load_dO(Tile (&tiles)[dO_parts], const void* data, const TileSource& source, int thread) {
  if constexpr (is_same<dout_elem, elem>) {
    if constexpr (is_async) request_tile(tiles[0], data, source, thread);
    else load_tile(tiles[0], data, source, thread);
  } else {
    const Global<dout_elem> from(const_cast<void*>(data));
    constexpr int width = Vec16<elem>::size;
    for (int at = thread; at < Tile::rows * Tile::cols / width; at += n_threads) {
      const int row = at / (Tile::cols / width), d = at % (Tile::cols / width) * width;
      Vec16<elem> chunks[dO_parts];
#pragma unroll
      for (int e = 0; e < width; ++e) {
        float rest = 0;
        if (row < source.rows && d + e < source.cols)
          rest = convert<float>(from.load(source.base + row * source.stride + d + e));
#pragma unroll
        for (int part = 0; part < dO_parts; ++part) {
          chunks[part].item[e] = convert<elem>(rest);
          rest -= convert<float>(chunks[part].item[e]);
        }
      }
#pragma unroll
      for (int part = 0; part < dO_parts; ++part) tiles[part].chunk(row, d / width) = chunks[part];
    }
  }
}

constexpr i64 SECTION_BYTES = 24 << 20;   // of Q, dO and the sums of dQ: half of the L2 of a large GPU

// What block x of the grid n_slots * heads_k owns: heads in sections whose rows fit the L2 cache together,
// and a section is finished before the next begins.  Inside it heads alternate and tiles go up: with causal
// the heaviest lead.  In turn they go down: see turn_of.
DEVICE KeyTile key_tile_in_section(const Args& args, i64 x) {
  if constexpr (is_packed) {
    KeyTile t = key_tile_of(args, x, tile_kv, args.heads_k);
    const i32 last = static_cast<i32>(ceil_div(t.seq.rows_k, tile_kv) - 1) * tile_kv;
    if (deterministic && t.exists) t.j0 = last - t.j0;
    return t;
  }
  const i64 n_tiles = ceil_div(args.len_k, tile_kv), key_heads = args.batch * args.heads_k;
  const i64 row_bytes = args.head_dim * (sizeof(elem) + sizeof(float)) + args.head_dim_v * sizeof(dout_elem);
  const i64 bytes = largest<i64>(args.len_q * row_bytes * (args.heads / args.heads_k), 1);
  const i64 wide = clamp<i64>(SECTION_BYTES / bytes, 1, key_heads);
  const i64 section = x / (wide * n_tiles), place = x % (wide * n_tiles);
  const i64 here = smallest(wide, key_heads - section * wide);   // the last one may be smaller
  const i64 head = section * wide + place % here;
  KeyTile t;
  t.h = head % args.heads_k;
  t.seq = sequence_of(args, head / args.heads_k);
  const i64 tile = place / here;
  t.j0 = static_cast<i32>(deterministic ? n_tiles - 1 - tile : tile) * tile_kv;
  t.exists = true;
  return t;
}

// How many blocks add to the dQ of queries i0 .. i_last before the block of keys j0: those of later keys.
// With causal the first to add is the tile on the diagonal, where its block begins: nobody waits for long.
DEVICE i32 turn_of(const Args& args, const Sequence& seq, i32 i0, i32 i_last, i32 j0) {
  const Range keys = visible_keys(args, seq, i0, i_last);
  return largest(keys.end - 1, keys.begin) / tile_kv - j0 / tile_kv;
}
// A count, asked for long before it matters; -1: look again.  It needs no acquire: what it allows are
// additions in L2, behind the barrier that follows.
DEVICE i32 early_count(const Global<i32>& counts, i64 index) {
#ifdef CUFLASH_EMULATED
  return -1;
#else
  i32 seen;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counts.address(index, 4)) : "memory");
  return seen;
#endif
}

// Where rows of one (sequence, head) lie: queries from i0 on, keys from j0 on.  end: the first row not to be
// touched.  d0: the first column.
DEVICE TileSource query_rows(const Tensor& tensor, const Sequence& seq, i64 h, i32 i0, i32 end, i64 dim,
                             i32 d0 = 0) {
  return tile_source(tensor, seq.array_b, seq.q_row0, opaque(static_cast<int>(h)), i0, end, d0, dim);
}
DEVICE TileSource key_rows(const Tensor& tensor, const Sequence& seq, i64 h_k, i32 j0, i32 end, i64 dim) {
  return tile_source(tensor, seq.array_b, seq.k_row0, h_k, j0, end, 0, dim);
}

// ---- gradients of options, and order

// Workspace, by slot:
constexpr int SLOT_DALIBI = 0;   // float [slots of key tiles, heads], one part of dalibi_slopes each
constexpr int SLOT_DBIAS = 1;    // float [batch, heads, len_k], dbias summed over the queries
constexpr int SLOT_COUNTS = 2;   // i32 [1 + heads * slots of query tiles]: is a number not finite (pass_odd);
                                 // then, of each query tile, the blocks that have added to its dQ
constexpr int SLOT_DQ = 3;       // float [heads, slots of query tiles, ...], sums of dQ as OfQ holds them

// A lane's sums over the queries of one head.
template <class Part> struct HeadSums {
  float of_key[Part::n_rows];   // dbias
  float slope;                  // dalibi
  DEVICE void clear() {
    slope = 0;
#pragma unroll
    for (int r = 0; r < Part::n_rows; ++r) of_key[r] = 0;
  }
};

// sums -> memory, in a fixed order.  All threads; scratch is free before and after.  place: in Part.
template <class Part, class Tile>
DEVICE void store_sums(const Args& args, const KeyTile& own, i64 h, const HeadSums<Part>& sums, Tile& scratch,
                       int place, int thread) {
  const int lane = thread % 32, warp = thread / 32;
  if constexpr (wants_dalibi) {
    const float mine = warp_sum(sums.slope);
    if (lane == 0) scratch.cells.template as<float>(warp, 0) = mine;
    block_sync();   // all warps have written
    if (thread == 0) {
      float total = 0;
      for (int w = 0; w < n_warps; ++w) total += scratch.cells.template as<float>(w, 0);
      const i64 tile = own.j0 / tile_kv;
      const i64 b = own.seq.b, slot = is_packed ? own.seq.k_row0 / tile_kv + b + tile : tile * args.batch + b;
      Global<float>(args.workspace[SLOT_DALIBI]).store(slot * args.heads + h, total);
    }
    block_sync();   // thread 0 has read: scratch is free
  }
  if constexpr (dbias_case == 2) {
#pragma unroll
    for (int r = 0; r < Part::n_rows; ++r) {
      const float mine = warp_sum<4>(sums.of_key[r]);
      if (lane % 4 == 0)
        scratch.cells.template as<float>(Part::row(place, lane, r), place % Part::across * 2) = mine;
    }
    block_sync();   // every part is there
    for (int row = thread; row < tile_kv && own.j0 + row < own.seq.rows_k; row += n_threads) {
      float total = 0;
      for (int w = 0; w < Part::across; ++w) total += scratch.cells.template as<float>(row, w * 2);
      const i64 key = own.seq.k_row0 + own.j0 + row;
      Global<float>(args.workspace[SLOT_DBIAS])
          .store((own.seq.array_b * args.heads + h) * args.len_k + key, total);
    }
    block_sync();   // all sums are read: scratch is free
  }
}

// Which of all query tiles of all heads this is: where its turn is counted and its part of dQ_tiles lies.
DEVICE i64 query_tile_number(const Args& args, const Sequence& seq, i64 h, i32 i0) {
  const i64 slot = is_packed ? seq.q_row0 / tile_q + seq.b : seq.b * ceil_div(args.len_q, tile_q);
  return h * n_slots(args, args.len_q, tile_q) + slot + i0 / tile_q;
}

// Columns of dQ at a time: half of 128, where dK, dV and dQ together would leave too few registers.  (192 have
// no half that all warps can share; of 256 the whole is as fast and at length 512 4 % faster.)
constexpr int kept_floats = tile_kv * (head_dim_tile + head_dim_v_tile) / n_threads;
constexpr bool halves_dQ = kept_floats + tile_q * head_dim_tile / n_threads > 160 && head_dim_tile == 128;
constexpr int step_d = halves_dQ ? head_dim_tile / 2 : head_dim_tile;
using OfQ = Share<tile_q, step_d>;

// Index in dQ_tiles of column d0 of a query tile.
DEVICE i64 dQ_index(i64 tile_number, int d0) { return (tile_number * head_dim_tile + d0) * tile_q; }
