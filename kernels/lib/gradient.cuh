// gradient.cuh - the backward of one tile: raw scores and dP come in, P and dS go out, in the same registers.
#pragma once
#include "barrier.cuh"
#include "mask.cuh"
#include "philox.cuh"
#include "products.cuh"
#include "score.cuh"

// What the elements of one (sequence, query head) share.
struct HeadRules {
  Scoring scoring;
  Masking masking;
  Dropout dropout;
  i64 dbias0;   // index of dbias (i = 0, j = 0)
};

DEVICE HeadRules head_rules_of(const Args& args, const Sequence& seq, i64 h) {
  HeadRules rules = {};
  rules.scoring = natural_scoring_of(args, seq, h);
  rules.masking = masking_of(args, seq, h);
  if constexpr (has_dropout) rules.dropout = dropout_of(args, seq.b, h);
  if constexpr (wants_dbias) rules.dbias0 = seq.b * args.dbias.batch + h * args.dbias.head;
  return rules;
}

// The gradient of one score.  P: as dV needs it (dropped, scaled).  d_score: of the score that softmax sees,
// for dbias and dalibi.  dS: of scale * q.k; the scale itself waits until dQ and dK are complete.
struct Gradient {
  acc P;
  acc d_score;
  acc dS;
};

// lse is +inf where the row attends to nothing.  That, a score of -inf, and a weight that dropout drops (kept
// is false) give no gradient, not even NaN.
DEVICE Gradient gradient_of(const Args& args, const HeadRules& rules, acc lse, acc delta, acc raw, acc dP,
                            bool kept, i32 i, i32 j) {
  const acc capped = capped_log2(rules.scoring, raw);
  const acc score = biased_log2(args, rules.scoring, capped, i, j);
  if (score == NEG_INF || lse == -NEG_INF) return {};   // asked one by one: the other of them may be NaN
  acc P = exp_near(score - lse);
  if constexpr (has_dropout) dP = kept ? dP * static_cast<acc>(args.dropout_scale) : acc(0);
  const acc d_score = P * (dP - delta);
  if constexpr (has_dropout) P = kept ? P * static_cast<acc>(args.dropout_scale) : acc(0);
  return {P, d_score, d_score * softcap_slope(rules.scoring, capped)};
}

// Operands of one tile in shared memory, a chunk of head_dim at a time.
template <int q_rows, int kv_rows, int d_cols, int d_v_cols> struct TileOperands {
  Swizzled<acc, q_rows, d_cols> Q;
  Swizzled<acc, q_rows, d_v_cols> dO;
  Swizzled<acc, kv_rows, d_cols> K;
  Swizzled<acc, kv_rows, d_v_cols> V;
  Shared<acc, 1, q_rows> lse;   // +inf for a row that attends to nothing
  Shared<acc, 1, q_rows> delta;

  // Rows [i0, ...) of query head h; rows that do not exist get zeros and P = 0.
  template <int threads>
  DEVICE void load_queries(const Args& args, const Sequence& seq, i64 h, i32 i0, i32 chunk, int thread) {
    h = opaque(static_cast<int>(h));   // see opaque: where a head begins is cheap to find again
    load_swizzled<elem, q_rows, d_cols, threads>(
        Q, args.Q.data,
        tile_source(args.Q, seq.array_b, seq.q_row0, h, i0, seq.len_q, chunk * d_cols, args.head_dim),
        thread);
    load_swizzled<dout_elem, q_rows, d_v_cols, threads>(
        dO, args.dO.data,
        tile_source(args.dO, seq.array_b, seq.q_row0, h, i0, seq.len_q, chunk * d_v_cols, args.head_dim_v),
        thread);
    for (int r = thread; r < q_rows; r += threads) {
      const i64 row = seq.q_row0 + i0 + r;
      lse(0, r) = -NEG_INF;
      delta(0, r) = 0;
      if (i0 + r >= seq.len_q) continue;
      const acc given = Global<acc>(args.lse.data).load(index_of(args.lse, seq.array_b, h, row));
      if (given != NEG_INF) lse(0, r) = given;
      delta(0, r) = Global<acc>(args.delta.data).load(index_of(args.delta, seq.array_b, h, row));
    }
  }

  // Rows [j0, ...) of key head h_k.
  template <int threads>
  DEVICE void load_keys(const Args& args, const Sequence& seq, i64 h_k, i32 j0, i32 chunk, int thread) {
    h_k = opaque(static_cast<int>(h_k));
    load_swizzled<elem, kv_rows, d_cols, threads>(
        K, args.K.data,
        tile_source(args.K, seq.array_b, seq.k_row0, h_k, j0, seq.len_k, chunk * d_cols, args.head_dim),
        thread);
    load_swizzled<elem, kv_rows, d_v_cols, threads>(
        V, args.V.data,
        tile_source(args.V, seq.array_b, seq.k_row0, h_k, j0, seq.len_k, chunk * d_v_cols, args.head_dim_v),
        thread);
  }
};

// Chunks of head_dim that a problem is walked in.
template <int d_cols, int d_v_cols> DEVICE i32 chunks_of(const Args& args) {
  return static_cast<i32>(largest(ceil_div(args.head_dim, d_cols), ceil_div(args.head_dim_v, d_v_cols)));
}

// S += Q K^T and dP += dO V^T over all chunks, own_chunk last: it stays in shared memory for what follows.
// new_queries, new_keys: these operands are not there yet (with several chunks they never are).
// When this begins nobody may still read statistics of the tile before; its operands may still be in use.
template <int threads, class Part, int q_rows, int kv_rows, int d_cols, int d_v_cols>
DEVICE void score_products(const Args& args, TileOperands<q_rows, kv_rows, d_cols, d_v_cols>& tile,
                           const Part& part, acc (&S)[Part::rows][Part::cols],
                           acc (&dP)[Part::rows][Part::cols], const Sequence& seq, i64 h, i64 h_k, i32 i0,
                           i32 j0, i32 own_chunk, bool new_queries, bool new_keys, int thread) {
  const i32 n_chunks = chunks_of<d_cols, d_v_cols>(args);
#pragma unroll 1
  for (i32 n = 1; n <= n_chunks; n++) {
    const i32 chunk = (own_chunk + n) % n_chunks;
    block_sync();   // every product with the operands in shared memory is done: they may be overwritten
    if (n_chunks > 1 || new_keys) tile.template load_keys<threads>(args, seq, h_k, j0, chunk, thread);
    if (n_chunks > 1 || new_queries) tile.template load_queries<threads>(args, seq, h, i0, chunk, thread);
    block_sync();   // they have arrived
    multiply_rows(part, S, tile.Q, tile.K);
    multiply_rows(part, dP, tile.dO, tile.V);
  }
}

// S <- P, dP <- dS.  tests: some element may be hidden; is_kept(i, j) is the block mask.
// visit(r, c, i, j, d_score): called for every visible element.
template <bool tests, class Part, class Tile, class Kept, class Visit>
DEVICE void tile_gradient(const Args& args, Tile& tile, const Part& part, acc (&S)[Part::rows][Part::cols],
                          acc (&dP)[Part::rows][Part::cols], const Sequence& seq, const HeadRules& rules,
                          i32 i0, i32 j0, Kept is_kept, Visit visit) {
  constexpr int width = Vec16<acc>::size;
#pragma unroll
  for (int r = 0; r < Part::rows; r++) {
    const int row = opaque(part.row(r));
    const i32 i = i0 + row;
    const acc lse = tile.lse(0, row), delta = tile.delta(0, row);
    Range keys = {0, 0};
    if constexpr (tests) keys = visible_keys(args, seq, i);
#pragma unroll
    for (int g = 0; g < Part::col_groups; g++) {
      const i32 j_first = j0 + part.chunk(g) * width;
      u32 keeps = ~0u;
      if constexpr (has_dropout) keeps = dropout_keeps_4(rules.dropout, i, j_first);
#pragma unroll
      for (int e = 0; e < width; e++) {
        const int c = g * width + e;
        const i32 j = j_first + e;
        Gradient gradient = {};
        if (!tests || (visible(args, rules.masking, keys, i, j) && is_kept(i, j))) {
          gradient = gradient_of(args, rules, lse, delta, S[r][c], dP[r][c], keeps >> e & 1, i, j);
          visit(r, c, i, j, gradient.d_score);
        }
        S[r][c] = gradient.P;
        dP[r][c] = gradient.dS;
      }
    }
  }
}

template <class Part, class Tile, class Kept, class Visit>
DEVICE void tile_gradient(const Args& args, Tile& tile, const Part& part, acc (&S)[Part::rows][Part::cols],
                          acc (&dP)[Part::rows][Part::cols], const Sequence& seq, const HeadRules& rules,
                          i32 i0, i32 j0, bool full, Kept is_kept, Visit visit) {
  if (full) tile_gradient<false>(args, tile, part, S, dP, seq, rules, i0, j0, is_kept, visit);
  else tile_gradient<true>(args, tile, part, S, dP, seq, rules, i0, j0, is_kept, visit);
}
