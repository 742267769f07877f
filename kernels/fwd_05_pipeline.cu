// fwd_05_pipeline.cu - attention forward on tensor cores, copies under the arithmetic.   sm_80 and later
//
// Read after   fwd_04_swizzle.cu          Read next   fwd_06_wgmma.cu
// Changes      K and V of tile j + 1 are asked for before tile j is used (or, with one stage, V under Q K^T
//              and the next K under P V).  Nobody's maximum moves without need (lib/votes.cuh).  Every option
//              of the contract, and floats as TF32 (lib/tensor_products.cuh)
//
// Algorithm    = tiled.forward.   One block: TILE_Q rows of one (batch, head); 16 of them are one mma's.
//                ask for Q and the first K, V
//                for each span of keys that some row may see:
//                  wait; ask for the next K, V
//                  for each tile of the span that rows of the warp may see:
//                    S = Q K^T             ldmatrix, mma.sync; float32 in registers
//                    S <- score, mask      lib/fragments.cuh; tiles visible as a whole are not tested
//                    m, l, O <- rescale    only when a score exceeds m by much
//                    O += P V              P = S packed to 16 bits; V is transposed by ldmatrix
//                O / l -> O_gmem      m + log l -> lse
//              Of three TF32 products (float32): a block that met numbers that are not finite says so, and
//              fwd_05_pipeline__careful does it again in a way in which infinities stay infinities.
// Grid         x: split + n_splits * tile.  Tiles by sections of heads whose K and V fit the L2 cache, the
//              heaviest of a section first (lib/sections.cuh).
//              Where query tiles are too few to fill the GPU, blocks share the keys of a tile: each writes a
//              part, and pass_merge puts them together
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warp owns TILE_Q / n_warps rows, a quad of lanes shares a row.
//              n_parts tiles of K and V come together: fewer barriers, and registers for one tile of S
// Shared       permuted: Q [TILE_Q, HEAD_DIM] | K [stages][span, HEAD_DIM] | V [stages][span, HEAD_DIM_V];
//              behind them the kept blocks, where elements ask for them
// Registers    per thread, of 16 rows a warp: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats.  No spills without
//              options in 16 bits and in float32 to head_dim 128; above, the bytes that the row says
// Bytes        per block: Q once, K and V of its key range, O once
// Barriers     2 stages: 1 block_sync a span, "it is there, and everyone has used the one before".
//              1 stage: 2, "K is there, V may be overwritten" and the other way round
// Tried        README.md, "What was tried for fwd_05_pipeline"
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/copier.cuh"
#include "lib/parts.cuh"
#include "lib/sections.cuh"
#include "lib/tensor_products.cuh"
#include "lib/votes.cuh"

using Walk = BlockWalk<tile_q, span, block_q, block_kv>;
constexpr bool asks_blocks = has_block_mask && !Walk::Shape::tiles_are_whole;
static_assert(n_stages == 2 || n_parts == 1, "fwd_05_pipeline: with one stage K is used as a whole, then V");

struct Tiles {
  QTile Q;
  KTile K[n_stages];   // ring: stage = number of the span % n_stages
  VTile V[n_stages];
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, 2> {};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_05_pipeline: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_05_pipeline: Args and launch.py disagree");

// Three TF32 products: did a warp meet numbers that are not finite?   [blocks, n_warps]
DEVICE Global<i32> odd_warps(const Args& args) { return Global<i32>(args.workspace[is_split ? 2 : 0]); }
DEVICE i64 odd_warp(int warp) { return static_cast<i64>(blockIdx.x) * n_warps + warp; }

DEVICE void attend(const Args& args, Smem& smem) {
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * row_blocks * 16;   // of the warp's first row in the tile
  const i64 n_shares = is_split ? n_splits : 1;
  const QueryTile own = query_tile_in_section<elem>(args, blockIdx.x / n_shares, tile_q);
  if (!own.exists) return;
  if constexpr (is_careful)
    if (!any(lane < n_warps && odd_warps(args).load(odd_warp(lane)))) return;
  const Sequence& seq = own.seq;
  const i32 i1 = smallest(own.i0 + tile_q, seq.len_q);
  const auto keys_of = [&](i32 first, i32 end) {
    return first < end ? visible_keys(args, seq, first, end - 1) : Range{0, 0};
  };
  Range keys = keys_of(own.i0, i1);
  if constexpr (is_split) keys = share_of(keys, blockIdx.x % n_shares, span);
  // Keys that some row of the warp sees, and keys that all of its rows see: those need no tests.
  const i32 first_row = own.i0 + warp_row, end_row = first_row + row_blocks * 16;
  const Range some_see = keys_of(first_row, smallest(end_row, i1));
  Range all_see = {0, 0};
  if (!masks_every_tile && !asks_blocks && end_row <= last_query(args, seq))
    all_see = {visible_keys(args, seq, end_row - 1).begin, visible_keys(args, seq, first_row).end};
  Walk walk(args.blocks, seq.b, own.h, own.i0, i1, keys.begin, lane);
  const auto next_span = [&](i32 j) {
    if constexpr (has_block_mask) return walk.next(j);
    return j;
  };
  const Copier<KTile> K_copier(source_of_K(args, own, 0, 0), thread);
  const Copier<VTile> V_copier(source_of_V(args, own, 0, 0), thread);
  const auto request_K = [&](i32 j, int stage) {
    K_copier.request(smem.K, stage % n_stages, args.K, j, keys.end - j, args.head_dim, thread);
  };
  const auto request_V = [&](i32 j, int stage) {
    V_copier.request(smem.V, stage % n_stages, args.V, j, keys.end - j, args.head_dim_v, thread);
  };

  i32 j0 = next_span(keys.begin / span * span);
  int stage = 0;   // number of the span % 2
  if (j0 < keys.end) {
    request_tile(smem.Q, args.Q.data, source_of_Q(args, own, i1), thread);
    request_K(j0, stage);
    if constexpr (n_stages == 2) request_V(j0, stage);
    if (thread < 32) smem.fill_blocks(walk, j0, lane, stage);
    cp_async_commit();
  }
  const Rules rules = rules_of(args, seq, own.h);
  const u32 Q_first = address_of_A(smem.Q, warp_row, lane);
  const u32 K_first = address_of_B(smem.K[0], 0, lane), V_first = address_of_V(smem.V[0], lane);
  Fragment<head_dim_v_tile> O;
  O.clear();
  RowState state = no_keys_yet();
  bool is_first = true;
#pragma unroll 1
  while (j0 < keys.end) {
    cp_async_wait<0>();
    if constexpr (is_one_tf32) {
      if (is_first) round_own_chunks(smem.Q, args.Q, thread), is_first = false;
      round_own_chunks(smem.K[stage % n_stages], args.K, thread);
      if constexpr (n_stages == 2) round_own_chunks(smem.V[stage], args.V, thread);
    }
    block_sync();   // K (2 stages: and V; first: and Q) is there; everyone has used the span before
    const i32 j_next = next_span(j0 + span);
    if constexpr (n_stages == 1) request_V(j0, stage);
    if (j_next < keys.end) {
      if constexpr (n_stages == 2) request_K(j_next, stage ^ 1), request_V(j_next, stage ^ 1);
      if (thread < 32) smem.fill_blocks(walk, j_next, lane, stage ^ 1);
    }
    cp_async_commit();

    const u32 K_at = K_first + stage % n_stages * sizeof(KTile), V_at = V_first + stage % n_stages * sizeof(VTile);
#pragma unroll unrolled_parts
    for (int part = 0; part < n_parts; ++part) {
      const i32 j = j0 + part * tile_kv;
      const bool has_work = some_see.begin < j + tile_kv && j < some_see.end;
      Weights P;
      if (has_work) {
        Fragment<tile_kv> S;
        multiply_QK(S, opaque(Q_first), K_at + KTile::down(part * tile_kv));
        const auto i0 = [&] { return own.i0 + opaque(thread) / 32 * row_blocks * 16; };   // keeps no register
        const auto is_kept = [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j, stage); };
        if (all_see.begin <= j && j + tile_kv <= all_see.end)
          modify_scores<false>(args, seq, rules, S, i0(), j, lane, is_kept);
        else
          modify_scores<true>(args, seq, rules, S, i0(), j, lane, is_kept);
        soften_by_vote(S, state, O, rules.late_scale);
        if constexpr (has_dropout) drop(rules.dropout, S, i0(), j, lane);
        P.take(S);
      }
      if constexpr (n_stages == 1) {
        cp_async_wait<0>();
        if constexpr (is_one_tf32) round_own_chunks(smem.V[0], args.V, thread);
        block_sync();   // V is there; everyone has used K
        if (j_next < keys.end) request_K(j_next, stage);
        cp_async_commit();
      }
      if (has_work) multiply_PV(O, P, smem.V[stage % n_stages], part * tile_kv, V_at, lane);
    }
    j0 = j_next;
    stage ^= 1;
  }

  if constexpr (is_three_tf32 && !is_careful) {
    const bool is_odd = any(!is_finite(O, state));
    if (lane == 0) odd_warps(args).store(odd_warp(thread / 32), is_odd);
  }
  const i64 x = opaque(blockIdx.x);   // asked again: its registers would be missing in the loop
  const QueryTile mine = query_tile_in_section<elem>(args, x / n_shares, tile_q);
  const Results results = is_split ? part_of(args, mine, x % n_shares) : results_of(args, mine);
  finish(args, mine, results, O, state, mine.i0 + warp_row, lane);
  if constexpr (is_split) store_O<acc>(O, results.O, results.O_rows, warp_row, lane);
  else store_O<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}

KERNEL(n_threads, blocks_per_sm) fwd_05_pipeline(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if constexpr (!is_careful) attend(args, smem);
}

KERNEL(n_threads, blocks_per_sm) fwd_05_pipeline__careful(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if constexpr (is_careful) attend(args, smem);
}
