// std_00_unfused.cu - attention as the formula says: scores written to HBM, softmax, read back.   any GPU
//
// Read first: the baseline of every speed-up.          Read next   fwd_01_naive.cu, bwd_01_naive.cu
//
// Algorithm    forward    __scores         S = scale Q K^T, hidden ones -inf                      S_gmem
//                         __softmax        P = exp(S - lse) in place, lse                         S_gmem
//                         __output         O = P V
//              backward   __scores, then
//                         __probabilities  P = exp(S - lse) in place, lse as given                S_gmem
//                         __dscores        dS = P (dO V^T - delta)                                dS_gmem
//                         __dq             dQ = scale dS K
//                         __dk, __dv       dK = scale dS^T Q,  dV = P^T dO, over a key head's query heads
// Grid         products: x = column tile of the result + n * (row tile + n * (head + heads * batch))
//              softmax, probabilities: one warp per row of S
// Tile         TILE_Q x TILE_KV of S, TILE_Q or TILE_KV x HEAD_DIM of the others; S goes in steps of HEAD_DIM
// Shared       two operand tiles, in acc, swizzled
// Bytes        S in acc: written, read twice and written by the softmax, read once per tile of V's columns
// Workspace    0: S, then P [batch, heads, len_q, len_k] in acc          1: dS, likewise
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/mask.cuh"
#include "lib/products.cuh"
#include "lib/score.cuh"
#include "lib/softmax.cuh"

constexpr int tile_d = head_dim_tile;   // columns of Q, K, V, dO that one step or one block takes
static_assert(head_dim_tile == head_dim_v_tile, "std_00_unfused: one chunk for head_dim and head_dim_v");

template <int rows_a, int cols_a, int rows_b, int cols_b> struct Pair {
  Swizzled<acc, rows_a, cols_a> A;
  Swizzled<acc, rows_b, cols_b> B;
};
using ScorePair = Pair<tile_q, tile_d, tile_kv, tile_d>;     // S = Q K^T, dP = dO V^T
using RowPair = Pair<tile_q, tile_kv, tile_kv, tile_d>;      // O = P V, dQ = dS K
using ColumnPair = Pair<tile_q, tile_kv, tile_q, tile_d>;    // dV = P^T dO, dK = dS^T Q
using ScorePart = Partition<acc, tile_q, tile_kv, n_warps, false>;
using RowPart = Partition<acc, tile_q, tile_d, n_warps, false>;
using ColumnPart = Partition<acc, tile_kv, tile_d, n_warps, true>;
template <class Part> using Block = acc[Part::rows][Part::cols];   // one thread's part of a result

// Which tile of which head a block owns, of results of n_rows x n_cols in tiles of rows x cols.
struct Owner {
  i64 b, h;
  i32 row, col;   // first row and column of the result
};

DEVICE Owner owner_of(i64 x, i64 n_rows, i32 rows, i64 n_cols, i32 cols, i64 heads) {
  const i64 across = ceil_div(n_cols, cols), down = ceil_div(n_rows, rows);
  const i64 tile = x % (across * down), head = x / (across * down);
  return {head / heads, head % heads, static_cast<i32>(tile / across) * rows,
          static_cast<i32>(tile % across) * cols};
}

// A tile of S or dS in the workspace, [batch, heads, len_q, len_k].
DEVICE TileSource scores_at(const Args& args, i64 b, i64 h, i32 i, i32 j) {
  const i64 base = ((b * args.heads + h) * args.len_q + i) * args.len_k + j;
  const i32 rows = static_cast<i32>(args.len_q) - i;
  const i32 cols = static_cast<i32>(smallest<i64>(args.len_k - j, tile_kv));
  return {base, args.len_k, rows, cols, args.len_k % Vec16<acc>::size == 0};
}

DEVICE TileSource rows_at(const Tensor& tensor, i64 b, i64 h, i32 row, i64 length, i32 d0, i64 dim) {
  return tile_source(tensor, b, 0, h, row, static_cast<i32>(length), d0, dim);
}

// result = A B^T over `dim` columns, of which the tiles hold tile_d at a time.
template <class From, class FromB>
DEVICE void product_of_rows(const ScorePart& part, Block<ScorePart>& result, ScorePair& smem,
                            const Owner& own, const Args& args, const Tensor& A, const Tensor& B, i64 dim,
                            int thread) {
  clear(result);
  const i64 h_k = own.h / (args.heads / args.heads_k);
#pragma unroll 1
  for (i32 d0 = 0; d0 < dim; d0 += tile_d) {
    const TileSource from_a = rows_at(A, own.b, own.h, own.row, args.len_q, d0, dim);
    const TileSource from_b = rows_at(B, own.b, h_k, own.col, args.len_k, d0, dim);
    load_swizzled<From, tile_q, tile_d, n_threads>(smem.A, A.data, from_a, thread);
    load_swizzled<FromB, tile_kv, tile_d, n_threads>(smem.B, B.data, from_b, thread);
    block_sync();   // both tiles are there
    multiply_rows(part, result, smem.A, smem.B);
    block_sync();   // both tiles have been read: the next step may overwrite them
  }
}

// result = S B over all keys, B = V or K.
DEVICE void product_over_keys(const RowPart& part, Block<RowPart>& result, RowPair& smem, const Owner& own,
                              const Args& args, void* S, const Tensor& B, i64 dim, int thread) {
  clear(result);
  const i64 h_k = own.h / (args.heads / args.heads_k);
#pragma unroll 1
  for (i32 j0 = 0; j0 < args.len_k; j0 += tile_kv) {
    const TileSource from_a = scores_at(args, own.b, own.h, own.row, j0);
    const TileSource from_b = rows_at(B, own.b, h_k, j0, args.len_k, own.col, dim);
    load_swizzled<acc, tile_q, tile_kv, n_threads>(smem.A, S, from_a, thread);
    load_swizzled<elem, tile_kv, tile_d, n_threads>(smem.B, B.data, from_b, thread);
    block_sync();   // both tiles are there
    multiply(part, result, smem.A, smem.B);
    block_sync();   // both tiles have been read: the next step may overwrite them
  }
}

// result = S^T B over all queries of all query heads of key head own.h, B = dO or Q.
template <class FromB>
DEVICE void product_over_queries(const ColumnPart& part, Block<ColumnPart>& result, ColumnPair& smem,
                                 const Owner& own, const Args& args, void* S, const Tensor& B, i64 dim,
                                 int thread) {
  clear(result);
  const i64 group = args.heads / args.heads_k;
#pragma unroll 1
  for (i64 h = own.h * group; h < (own.h + 1) * group; ++h)
#pragma unroll 1
    for (i32 i0 = 0; i0 < args.len_q; i0 += tile_q) {
      const TileSource from_a = scores_at(args, own.b, h, i0, own.row);
      const TileSource from_b = rows_at(B, own.b, h, i0, args.len_q, own.col, dim);
      load_swizzled<acc, tile_q, tile_kv, n_threads>(smem.A, S, from_a, thread);
      load_swizzled<FromB, tile_q, tile_d, n_threads>(smem.B, B.data, from_b, thread);
      block_sync();   // both tiles are there
      multiply_columns(part, result, smem.A, smem.B);
      block_sync();   // both tiles have been read: the next step may overwrite them
    }
}

KERNEL(n_threads, 1) std_00_unfused__scores(const __grid_constant__ Args args) {
  SHARED_MEMORY(ScorePair, smem);
  const int thread = threadIdx.x;
  const Owner own = owner_of(blockIdx.x, args.len_q, tile_q, args.len_k, tile_kv, args.heads);
  const ScorePart part(thread);
  Block<ScorePart> S;
  product_of_rows<elem, elem>(part, S, smem, own, args, args.Q, args.K, args.head_dim, thread);

  const Sequence seq = sequence_of(args, own.b);
  const Scoring scoring = scoring_of(args, seq, own.h);
#pragma unroll
  for (int r = 0; r < ScorePart::rows; ++r) {
    const Range keys = visible_keys(args, seq, own.row + part.row(r));
#pragma unroll
    for (int c = 0; c < ScorePart::cols; ++c) {
      const i32 j = own.col + part.col(c);
      S[r][c] = j >= keys.begin && j < keys.end ? capped_log2(scoring, S[r][c]) : NEG_INF;
    }
  }
  store_block<acc>(part, S, 1, args.workspace[0], scores_at(args, own.b, own.h, own.row, own.col));
}

// One warp per row: P = 2^(S - m) / l in place, lse.
KERNEL(n_threads, 1) std_00_unfused__softmax(const __grid_constant__ Args args) {
  const int lane = threadIdx.x % 32;
  const i64 row = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32;   // i + len_q * (h + heads * b)
  if (row >= args.batch * args.heads * args.len_q) return;
  const Global<acc> S(args.workspace[0]);

  acc m = NEG_INF, l = 0;
  for (i64 j = lane; j < args.len_k; j += 32) {
    const acc s = S.load(row * args.len_k + j), m_new = largest(m, s), reference = finite_max(m_new);
    l = l * rescaling(m, reference) + exp_score(s - reference);
    m = m_new;
  }
  const acc m_row = max_over_lanes<31>(m), reference = finite_max(m_row);
  const RowEnd end = finish_row(m_row, sum_over_lanes<31>(l * rescaling(m, reference)), NEG_INF, 1);
  for (i64 j = lane; j < args.len_k; j += 32)
    S.store(row * args.len_k + j, exp_score(S.load(row * args.len_k + j) - reference) * end.factor);
  const i64 i = row % args.len_q, head = row / args.len_q;
  if (lane == 0)
    Global<acc>(args.lse.data).store(index_of(args.lse, head / args.heads, head % args.heads, i), end.lse);
}

KERNEL(n_threads, 1) std_00_unfused__output(const __grid_constant__ Args args) {
  SHARED_MEMORY(RowPair, smem);
  const Owner own = owner_of(blockIdx.x, args.len_q, tile_q, args.head_dim_v, tile_d, args.heads);
  const RowPart part(threadIdx.x);
  Block<RowPart> O;
  product_over_keys(part, O, smem, own, args, args.workspace[0], args.V, args.head_dim_v, threadIdx.x);
  store_block<out_elem>(part, O, 1, args.O.data,
                        rows_at(args.O, own.b, own.h, own.row, args.len_q, own.col, args.head_dim_v));
}

// ---- backward

// One warp per row: P = exp(S - lse) in place.
KERNEL(n_threads, 1) std_00_unfused__probabilities(const __grid_constant__ Args args) {
  const int lane = threadIdx.x % 32;
  const i64 row = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32;   // i + len_q * (h + heads * b)
  if (row >= args.batch * args.heads * args.len_q) return;
  const Global<acc> S(args.workspace[0]);
  const i64 i = row % args.len_q, h = row / args.len_q % args.heads, b = row / args.len_q / args.heads;
  const acc lse = Global<acc>(args.lse.data).load(index_of(args.lse, b, h, i));
  const double reference = static_cast<double>(finite_max(lse)) * SCORE_UNIT;   // rounded: row shifts
  for (i64 j = lane; j < args.len_k; j += 32) {
    const acc s = S.load(row * args.len_k + j);
    // Hidden, and every score of an empty row: 0, even where lse is NaN.
    S.store(row * args.len_k + j, s == NEG_INF ? acc(0) : exp_score(static_cast<acc>(s - reference)));
  }
}

KERNEL(n_threads, 1) std_00_unfused__dscores(const __grid_constant__ Args args) {
  SHARED_MEMORY(ScorePair, smem);
  const int thread = threadIdx.x;
  const Owner own = owner_of(blockIdx.x, args.len_q, tile_q, args.len_k, tile_kv, args.heads);
  const ScorePart part(thread);
  Block<ScorePart> dS;
  product_of_rows<dout_elem, elem>(part, dS, smem, own, args, args.dO, args.V, args.head_dim_v, thread);

  const TileSource place = scores_at(args, own.b, own.h, own.row, own.col);
  const Global<acc> P(args.workspace[0]), delta(args.delta.data);
  const Sequence seq = sequence_of(args, own.b);
#pragma unroll
  for (int r = 0; r < ScorePart::rows; ++r) {
    const int row = part.row(r);
    if (row >= place.rows) continue;
    const Range keys = visible_keys(args, seq, own.row + row);
    const acc delta_row = delta.load(index_of(args.delta, own.b, own.h, own.row + row));
    const i64 first = place.base + row * place.stride;
#pragma unroll
    for (int c = 0; c < ScorePart::cols; ++c) {
      if (part.col(c) >= place.cols) continue;
      const i32 j = own.col + part.col(c);
      const acc p = j >= keys.begin && j < keys.end ? P.load(first + part.col(c)) : acc(0);
      dS[r][c] = p != 0 ? p * (dS[r][c] - delta_row) : acc(0);   // hidden: 0, even where dP or delta is NaN
    }
  }
  store_block<acc>(part, dS, 1, args.workspace[1], place);
}

KERNEL(n_threads, 1) std_00_unfused__dq(const __grid_constant__ Args args) {
  SHARED_MEMORY(RowPair, smem);
  const Owner own = owner_of(blockIdx.x, args.len_q, tile_q, args.head_dim, tile_d, args.heads);
  const RowPart part(threadIdx.x);
  Block<RowPart> dQ;
  product_over_keys(part, dQ, smem, own, args, args.workspace[1], args.K, args.head_dim, threadIdx.x);
  store_block<out_elem>(part, dQ, static_cast<acc>(args.scale), args.dQ.data,
                        rows_at(args.dQ, own.b, own.h, own.row, args.len_q, own.col, args.head_dim));
}

KERNEL(n_threads, 1) std_00_unfused__dk(const __grid_constant__ Args args) {
  SHARED_MEMORY(ColumnPair, smem);
  const Owner own = owner_of(blockIdx.x, args.len_k, tile_kv, args.head_dim, tile_d, args.heads_k);
  const ColumnPart part(threadIdx.x);
  Block<ColumnPart> dK;
  const int thread = threadIdx.x;
  product_over_queries<elem>(part, dK, smem, own, args, args.workspace[1], args.Q, args.head_dim, thread);
  store_block<out_elem>(part, dK, static_cast<acc>(args.scale), args.dK.data,
                        rows_at(args.dK, own.b, own.h, own.row, args.len_k, own.col, args.head_dim));
}

KERNEL(n_threads, 1) std_00_unfused__dv(const __grid_constant__ Args args) {
  SHARED_MEMORY(ColumnPair, smem);
  const Owner own = owner_of(blockIdx.x, args.len_k, tile_kv, args.head_dim_v, tile_d, args.heads_k);
  const ColumnPart part(threadIdx.x);
  Block<ColumnPart> dV;
  const int thread = threadIdx.x;
  void* P = args.workspace[0];
  product_over_queries<dout_elem>(part, dV, smem, own, args, P, args.dO, args.head_dim_v, thread);
  store_block<out_elem>(part, dV, 1, args.dV.data,
                        rows_at(args.dV, own.b, own.h, own.row, args.len_k, own.col, args.head_dim_v));
}
