// pass_dbias.cu - the gradient of bias, summed over broadcast axes, always in one order.   any GPU
//
// Read after   bwd_02_tiled.cu
// Which of them runs: dbias_case, which row.py finds from the bias' shape
//   1  every score has its own entry      the backward kernel stores it, but never visits hidden tiles:
//                                         pass_dbias__zero comes first
//   2  queries share an entry             the backward kernel leaves sums per (head, key): pass_dbias__keys
//   3  keys share an entry                pass_dbias__row_sums walks the keys of each row; pass_dbias__rows
//                                         (on paper a row's sum is dlse + delta * P_sink; with O rounded to
//                                         the dtype of out it is not, and the difference counts)
//   4  heads or sequences share an entry  pass_dbias owns a tile of entries and makes P and dP again for each
//                                         head and sequence: two products of five, no memory but the result
// Grid         x: a warp per row (zero); a thread per entry (keys); a block per query tile and head
//              (row_sums); a thread per entry, a block if queries share it too (rows); a block per tile (4)
// Shared       Q, dO, K, V [tile, chunk of d] | lse, delta [tile]
// Barriers     those of score_products, and "nobody reads the kept blocks any more"
#include "lib/params.cuh"
#include "lib/blocks.cuh"
#include "lib/gradient.cuh"
#include "lib/reduce.cuh"

constexpr int SLOT_DBIAS = 1;   // workspace: acc [batch, heads, len_k], case 3: [batch, heads, len_q]
constexpr int tile = is_same<acc, double> ? 32 : 64;   // entries along both axes
constexpr int chunk_d = 32;   // head_dim and head_dim_v are walked in these
using Walk = BlockWalk<tile, tile, block_q, block_kv>;
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;
using OfScores = Partition<acc, tile, tile, n_warps, false>;

struct Smem : KeptBlocks<Walk, asks_blocks> {
  TileOperands<tile, tile, chunk_d, chunk_d> operands;
};
struct SmemRows {
  BlockSum<n_threads> sum;
};

// Entries along an axis.  Rows and columns say themselves whether they are broadcast: an empty array may have
// any strides.  A broadcast batch or head axis has stride 0, even when there are no sequences or no heads.
DEVICE i64 entries(i64 n) { return n == 1ll << 62 ? 1 : n; }
DEVICE i64 entries(i64 stride, i64 n) { return stride == 0 ? 1 : n; }

KERNEL(n_threads, 1) pass_dbias__zero(const __grid_constant__ Args args) {
  const i64 rows = entries(args.dbias.rows), cols = entries(args.dbias.cols);
  const i64 at = static_cast<i64>(blockIdx.x) * n_warps + threadIdx.x / 32;
  if (at >= args.batch * args.heads * rows) return;
  const i64 first = at / rows / args.heads * args.dbias.batch + at / rows % args.heads * args.dbias.head +
                    at % rows * args.dbias.row;
  for (i64 col = threadIdx.x % 32; col < cols; col += 32)
    Global<bias_elem>(args.dbias.data).store(first + col * args.dbias.col, convert<bias_elem>(0.f));
}

KERNEL(n_threads, 1) pass_dbias__keys(const __grid_constant__ Args args) {
  const i64 cols = entries(args.dbias.cols), n_heads = entries(args.dbias.head, args.heads);
  const i64 at = static_cast<i64>(blockIdx.x) * n_threads + threadIdx.x;
  if (at >= cols * n_heads * entries(args.dbias.batch, args.batch)) return;
  const i64 j = at % cols, b_entry = at / cols / n_heads, h_entry = at / cols % n_heads;
  const bool sums_batch = args.dbias.batch == 0, sums_heads = args.dbias.head == 0;
  const Global<acc> parts(args.workspace[SLOT_DBIAS]);
  acc sum = 0;
  for (i64 b = sums_batch ? 0 : b_entry; b < (sums_batch ? args.batch : b_entry + 1); b++) {
    const Sequence seq = sequence_of(args, b);
    if (j >= seq.len_k) continue;
    for (i64 h = sums_heads ? 0 : h_entry; h < (sums_heads ? args.heads : h_entry + 1); h++)
      sum += parts.load((seq.array_b * args.heads + h) * args.len_k + seq.k_row0 + j);
  }
  Global<bias_elem>(args.dbias.data)
      .store(b_entry * args.dbias.batch + h_entry * args.dbias.head + j * args.dbias.col,
             convert<bias_elem>(sum));
}

// Case 3: the sums over the keys of each row of one query tile of one (sequence, query head).
KERNEL(n_threads, 1) pass_dbias__row_sums(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if constexpr (dbias_case == 3) {
    constexpr int n_parts = OfScores::lanes_x * OfScores::warps_x;   // threads that share a row
    static_assert(n_parts <= chunk_d, "pass_dbias: no room for the row sums");
    const int thread = threadIdx.x, lane = thread % 32;
    const QueryTile own = query_tile_of(args, blockIdx.x, tile);
    if (!own.exists) return;
    const Sequence& seq = own.seq;
    const i32 i0 = own.i0, i1 = smallest(i0 + tile, seq.len_q);
    const Range keys = i0 < i1 ? visible_keys(args, seq, i0, i1 - 1) : Range{0, 0};
    const OfScores part(thread);
    acc sums[OfScores::rows];
#pragma unroll
    for (int r = 0; r < OfScores::rows; r++) sums[r] = 0;

    if (keys.begin < keys.end) {
      const HeadRules rules = head_rules_of(args, seq, own.h);
      Walk walk(args.blocks, seq.b, own.h, i0, i1, keys.begin, lane);
      bool new_queries = true;
#pragma unroll 1
      for (i32 j0 = keys.begin / tile * tile; j0 < keys.end; j0 += tile) {
        if constexpr (has_block_mask) j0 = walk.next(j0);
        if (has_block_mask && j0 >= keys.end) break;
        if constexpr (asks_blocks) block_sync();   // nobody reads the kept blocks of the tile before any more
        if (thread < 32) smem.fill_blocks(walk, j0, lane);
        acc S[OfScores::rows][OfScores::cols], dP[OfScores::rows][OfScores::cols];
        clear(S);
        clear(dP);
        score_products<n_threads>(args, smem.operands, part, S, dP, seq, own.h, own.h_k, i0, j0, 0,
                                  new_queries, true, thread);
        new_queries = false;
        const bool full = !asks_blocks && is_fully_visible(args, seq, i0, i0 + tile, j0, j0 + tile);
        tile_gradient(
            args, smem.operands, part, S, dP, seq, rules, i0, j0, full,
            [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j); },
            [&](int r, int, i32, i32, acc d_score) { sums[r] += d_score; });
      }
    }
    block_sync();   // all products are done: Q may hold the sums
    Swizzled<acc, tile, chunk_d>& parts = smem.operands.Q;
#pragma unroll
    for (int r = 0; r < OfScores::rows; r++) parts.cells(part.row(r), part.first_chunk) = sums[r];
    block_sync();   // every part is there
    for (int r = thread; r < tile && i0 + r < seq.rows_q; r += n_threads) {
      acc total = 0;
      for (int n = 0; n < n_parts; n++) total += parts.cells(r, n);
      Global<acc>(args.workspace[SLOT_DBIAS])
          .store((seq.array_b * args.heads + own.h) * args.len_q + seq.q_row0 + i0 + r, total);
    }
  }
}

KERNEL(n_threads, 1) pass_dbias__rows(const __grid_constant__ Args args) {
  SHARED_MEMORY(SmemRows, smem);
  const bool sums_rows = args.dbias.row == 0, sums_batch = args.dbias.batch == 0,
             sums_heads = args.dbias.head == 0;
  const i64 rows = entries(args.dbias.rows), n_heads = entries(args.dbias.head, args.heads);
  const i64 at = sums_rows ? blockIdx.x : static_cast<i64>(blockIdx.x) * n_threads + threadIdx.x;
  const bool is_entry = at < rows * n_heads * entries(args.dbias.batch, args.batch);
  const i64 i_entry = at % rows, h_entry = at / rows % n_heads, b_entry = at / rows / n_heads;
  const Global<acc> sums(args.workspace[SLOT_DBIAS]);
  double mine = 0;
  for (i64 b = sums_batch ? 0 : b_entry; is_entry && b < (sums_batch ? args.batch : b_entry + 1); b++) {
    const Sequence seq = sequence_of(args, b);
    const i64 end = seq.len_q;
    for (i64 h = sums_heads ? 0 : h_entry; h < (sums_heads ? args.heads : h_entry + 1); h++) {
      if (sums_rows)
        for (i64 i = threadIdx.x; i < end; i += n_threads)
          mine += sums.load((seq.array_b * args.heads + h) * args.len_q + seq.q_row0 + i);
      else if (i_entry < end)
        mine += sums.load((seq.array_b * args.heads + h) * args.len_q + seq.q_row0 + i_entry);
    }
  }
  const double total =
      sums_rows ? smem.sum(mine, threadIdx.x) : mine;   // sums_rows is the same for the whole block
  if (is_entry && (!sums_rows || threadIdx.x == 0))
    Global<bias_elem>(args.dbias.data)
        .store(b_entry * args.dbias.batch + h_entry * args.dbias.head + i_entry * args.dbias.row,
               convert<bias_elem>(static_cast<acc>(total)));
}

KERNEL(n_threads, 1) pass_dbias(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes,
                "pass_dbias: Smem and cuflash/rows.py disagree");
  if constexpr (dbias_case == 4) {
    const int thread = threadIdx.x, lane = thread % 32;
    const i64 rows = entries(args.dbias.rows), cols = entries(args.dbias.cols);
    const i64 n_heads = entries(args.dbias.head, args.heads);
    const i64 col_tiles = ceil_div(cols, tile), row_tiles = ceil_div(rows, tile),
              entry = blockIdx.x / col_tiles / row_tiles;
    const i32 j0 = static_cast<i32>(blockIdx.x % col_tiles) * tile,
              i0 = static_cast<i32>(blockIdx.x / col_tiles % row_tiles) * tile;
    const i64 b_entry = entry / n_heads, h_entry = entry % n_heads;
    const bool sums_batch = args.dbias.batch == 0, sums_heads = args.dbias.head == 0;
    const OfScores part(thread);
    acc sums[OfScores::rows][OfScores::cols];
    clear(sums);

#pragma unroll 1
    for (i64 b = sums_batch ? 0 : b_entry; b < (sums_batch ? args.batch : b_entry + 1); b++) {
      const Sequence seq = sequence_of(args, b);
      const i32 i1 = smallest(i0 + tile, seq.len_q);
      if (i0 >= i1) continue;
      const Range keys = visible_keys(args, seq, i0, i1 - 1);
      if (keys.begin >= j0 + tile || keys.end <= j0) continue;
#pragma unroll 1
      for (i64 h = sums_heads ? 0 : h_entry; h < (sums_heads ? args.heads : h_entry + 1); h++) {
        Walk walk(args.blocks, seq.b, h, i0, i1, j0, lane);
        if constexpr (has_block_mask)
          if (walk.next(j0) != j0) continue;
        if constexpr (asks_blocks) block_sync();   // nobody reads the kept blocks of the tile before any more
        if (thread < 32) smem.fill_blocks(walk, j0, lane);
        const HeadRules rules = head_rules_of(args, seq, h);
        acc S[OfScores::rows][OfScores::cols], dP[OfScores::rows][OfScores::cols];
        clear(S);
        clear(dP);
        const i64 h_k = h / (args.heads / args.heads_k);
        score_products<n_threads>(args, smem.operands, part, S, dP, seq, h, h_k, i0, j0, 0, true, true,
                                  thread);
        const bool full = !asks_blocks && is_fully_visible(args, seq, i0, i0 + tile, j0, j0 + tile);
        tile_gradient(
            args, smem.operands, part, S, dP, seq, rules, i0, j0, full,
            [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j); },
            [&](int r, int c, i32, i32, acc d_score) { sums[r][c] += d_score; });
      }
    }

    const Global<bias_elem> dbias(args.dbias.data);
#pragma unroll
    for (int r = 0; r < OfScores::rows; r++)
#pragma unroll
      for (int c = 0; c < OfScores::cols; c++) {
        const i64 i = i0 + part.row(r), j = j0 + part.col(c);
        if (i < rows && j < cols)
          dbias.store(b_entry * args.dbias.batch + h_entry * args.dbias.head + i * args.dbias.row +
                          j * args.dbias.col,
                      convert<bias_elem>(sums[r][c]));
      }
  }
}
