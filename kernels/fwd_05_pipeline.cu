// fwd_05_pipeline.cu - attention forward on tensor cores, copies under the arithmetic.   sm_80 and later
//
// Read after   fwd_04_swizzle.cu          Read next   fwd_06_wgmma.cu
// Changes      K and V of tile j + 1 are asked for before tile j is used (or, with one stage, V under Q K^T
//              and the next K under P V).  After the first keys nobody looks for a maximum (lib/votes.cuh).
//              Part of Q stays in registers.  Every option of the contract, floats as TF32
//              (lib/tensor_products.cuh), and few queries: the heads of a group in one tile
//              (lib/heads_together.cuh)
//
// Algorithm    = tiled.forward.   One block: TILE_Q rows of one (batch, head); 16 of them are one mma's.
//                ask for Q and the first K, V
//                for each span of keys that some row may see:
//                  wait; ask for the next K, V
//                  for each tile of the span that rows of the warp may see:
//                    S = Q K^T             ldmatrix, mma.sync; float32 in registers
//                    S <- score, mask      tiles visible as a whole are not tested
//                    m, l, O <- rescale    when a score exceeds m by much; of plain scores only until each
//                                          row has an m: weights may be as large as their type can hold
//                    O += P V              P = S packed to 16 bits; V is transposed by ldmatrix
//                O / l -> O_gmem      m + log l -> lse
//              A block whose results are not finite, or whose scores are beyond 2^21, starts again and looks
//              for maxima.  Of three TF32 products (float32) it says so instead, and
//              fwd_05_pipeline__careful does it again in a way in which infinities stay infinities.
// Grid         x: split + n_splits * tile.  Tiles by sections of heads whose K and V fit the L2 cache, the
//              heaviest of a section first (lib/sections.cuh).
//              Where query tiles are too few to fill the GPU, blocks share the keys of a tile: each writes a
//              part, and pass_merge puts them together
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warp owns TILE_Q / n_warps rows, a quad of lanes shares a row.
//              n_parts tiles of K and V come together: fewer barriers, and registers for one tile of S
// Shared       permuted: Q [TILE_Q, HEAD_DIM] | K [stages][span, HEAD_DIM] | V [stages][span, HEAD_DIM_V];
//              behind them the kept blocks, where elements ask for them, and a few numbers
// Registers    per thread, of 16 rows a warp: S TILE_KV / 2 and O HEAD_DIM_V / 2 floats.  No spills without
//              options in 16 bits and, on sm_90, in float32 to head_dim 192; else the bytes that the row says
// Built        causal, NVRTC 12.9: registers of a thread, KB of shared memory, by head_dim.  256, 8192: keys,
//              in bfloat16; float32: as three products
//                             64         96         128        192        256
//              sm_80, 256     231 48     245 60     251 64     210 72     242 128
//              sm_89, 256     233 48     212 36     248 48     209 48     244 96
//              sm_120, 256    222 48     213 36     254 48     219 48     244 96
//              sm_90, 256     168 48     253 72     254 96     244 72     253 96
//              sm_90, 8192    248 80     246 96     254 96     244 72     254 192
//              sm_90, float32 200 80     241 72     245 96     255 144    255 96
// Bytes        per block: Q once, K and V of its key range, O once
// Barriers     2 stages: 1 block_sync a span, "it is there, and everyone has used the one before".
//              1 stage: 2, "K is there, V may be overwritten" and the other way round
// Tried        ATTEMPTS.md
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/blocks.cuh"
#include "lib/copier.cuh"
#include "lib/parts.cuh"
#include "lib/sections.cuh"
#include "lib/seen.cuh"
#include "lib/tensor_products.cuh"
#include "lib/votes.cuh"

using Walk = BlockWalk<tile_q, span, block_q, block_kv>;
// At head_dim 64 the first product is too short to hide what a request takes.
constexpr bool asks_late = head_dim_tile > 64;
static_assert(n_stages == 2 || n_parts == 1, "fwd_05_pipeline: with one stage K is used as a whole, then V");
static_assert(n_stages == 2 || !is_one_tf32, "fwd_05_pipeline: floats are rounded while nobody reads them");

struct Tiles {
  QTile Q;
  KTile K[n_stages];   // ring: stage = number of the span % n_stages
  VTile V[n_stages];
};
struct Notes {
  Shared<i64, 1, 2> begins;         // index of row 0 of K, of V, where registers are too scarce to keep it
  Shared<i32, 1, n_warps> is_odd;   // warps that met infinities or NaN
};
struct Smem : Tiles, KeptBlocks<Walk, asks_blocks, 2>, Notes {};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_05_pipeline: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_05_pipeline: Args and launch.py disagree");

// Three TF32 products: did a warp meet numbers that are not finite?   [blocks, n_warps]
DEVICE Global<i32> odd_warps(const Args& args) { return Global<i32>(args.workspace[is_split ? 2 : 0]); }
DEVICE i64 odd_warp(int warp) { return static_cast<i64>(blockIdx.x) * n_warps + warp; }

DEVICE QueryTile tile_of(const Args& args, i64 x) {
  return heads_together > 1 ? tile_of_heads(args, x, tile_q) : query_tile_in_section<elem>(args, x, tile_q);
}
// trusts: scores are no larger than most, and the maximum of the first keys may stand for all.  Returns
// whether a warp of the block met others, infinities or NaN.
template <bool trusts> DEVICE bool attend(const Args& args, Smem& smem) {
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * row_blocks * 16;   // of the warp's first row in the tile
  const i64 n_shares = is_split ? n_splits : 1;
  const QueryTile own = tile_of(args, blockIdx.x / n_shares);
  if (!own.exists) return false;
  if constexpr (is_careful)
    if (!any(lane < n_warps && odd_warps(args).load(odd_warp(lane)))) return false;
  const Sequence& seq = own.seq;
  const i32 i1 = smallest(own.i0 + tile_q, seq.len_q * heads_together);
  Range keys = some_see(args, seq, own.i0, i1);
  if constexpr (is_split) keys = share_of(keys, blockIdx.x % n_shares, span);
  const i32 row0 = own.i0 + warp_row, row1 = row0 + row_blocks * 16;
  const Range some = some_see(args, seq, row0, smallest(row1, i1));
  // With a bias rows must exist.
  const Range all = all_see<asks_blocks>(args, seq, row0, has_bias ? row1 : smallest(row1, i1));
  Walk walk(args.blocks, seq.b, own.h, own.i0, i1, keys.begin, lane);
  const auto next_span = [&](i32 j) {
    if constexpr (has_block_mask) return walk.next(j);
    return j;
  };
  const i64 K_begin = source_of_K(args, own, 0, 0).base, V_begin = source_of_V(args, own, 0, 0).base;
  if constexpr (notes_begins) {
    if (thread == 0) smem.begins(0, 0) = K_begin, smem.begins(0, 1) = V_begin;
    block_sync();   // where K and V begin is known
  }
  const Copier<KTile> K_copier(K_begin, args.K, thread);
  const Copier<VTile> V_copier(V_begin, args.V, thread);
  const auto request_K = [&](i32 j, int stage) {
    const auto copier = notes_begins ? Copier<KTile>(smem.begins(0, 0), args.K, thread) : K_copier;
    copier.request(smem.K[stage % n_stages], args.K, j, keys.end - j, args.head_dim, thread);
  };
  const auto request_V = [&](i32 j, int stage) {
    const auto copier = notes_begins ? Copier<VTile>(smem.begins(0, 1), args.V, thread) : V_copier;
    copier.request(smem.V[stage % n_stages], args.V, j, keys.end - j, args.head_dim_v, thread);
  };

  i32 j0 = next_span(keys.begin / span * span);
  int stage = 0;   // number of the span % 2
  if (j0 < keys.end) {
    if constexpr (heads_together > 1) request_heads(smem.Q, args, own, i1, thread);
    else request_tile(smem.Q, args.Q.data, source_of_Q(args, own, i1), thread);
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
  bool is_first = true, has_maximum = false;
  KeptQ kept;
  if constexpr (kept_steps > 0) {
    cp_async_wait<0>();
    block_sync();   // Q is there
    kept.load(Q_first);
  }
#pragma unroll 1
  while (j0 < keys.end) {
    cp_async_wait<0>();
    if constexpr (is_one_tf32) {
      if (is_first) round_own_chunks(smem.Q, args.Q, thread), is_first = false;
      round_own_chunks(smem.K[stage], args.K, thread);
      round_own_chunks(smem.V[stage], args.V, thread);
    }
    block_sync();   // K (2 stages: and V; first: and Q) is there; everyone has used the span before
    const i32 j_next = next_span(j0 + span);
    const auto request_next = [&] {
      if (j_next < keys.end) {
        request_K(j_next, stage ^ 1);
        if constexpr (n_stages == 2) request_V(j_next, stage ^ 1);
      }
      cp_async_commit();
    };
    if (j_next < keys.end && thread < 32) smem.fill_blocks(walk, j_next, lane, stage ^ 1);

    const u32 K_at = K_first + stage % n_stages * sizeof(KTile);
    const u32 V_at = V_first + stage % n_stages * sizeof(VTile);
    const auto multiply_K = [&](Fragment<tile_kv>& S, int part) {
      multiply_QK(S, kept, opaque(Q_first), K_at + KTile::down(part * tile_kv));
    };
    const auto multiply_V = [&](const Fragment<tile_kv>& S, int part) {
      Weights P;
      P.take(S);
      multiply_PV(O, P, smem.V[stage % n_stages], part * tile_kv, V_at, lane);
    };
    const auto has_work = [&](i32 j) { return some.begin < j + tile_kv && j < some.end; };
    const auto hide_and_weigh = [&](Fragment<tile_kv>& S, i32 j) {
      const auto i0 = [&] { return own.i0 + opaque(thread) / 32 * row_blocks * 16; };   // keeps no register
      const auto is_kept = [&](i32 i, i32 j) { return smem.keeps(walk, i, j0, j, stage); };
      const bool is_whole = all.begin <= j && j + tile_kv <= all.end;
      if constexpr (is_plain) {
        if (is_whole) hide_scores<false>(args, seq, rules, S, i0(), j, lane);
        else hide_scores<true>(args, seq, rules, S, i0(), j, lane);
      } else {
        if (is_whole) modify_scores<false>(args, seq, rules, S, i0(), j, lane, is_kept);
        else modify_scores<true>(args, seq, rules, S, i0(), j, lane, is_kept);
      }
      if (!has_maximum) move_maximum(S, state, O, rules.late_scale);
      weigh<trusts>(S, state, rules.late_scale);
      if constexpr (has_dropout) drop(rules.dropout, S, i0(), j, lane);
      if constexpr (trusts) has_maximum = has_maximum || (rules.scoring.scale_log2 > 0 && is_set(state));
    };

    if constexpr (n_stages == 1) {
      request_V(j0, 0);
      cp_async_commit();
      Fragment<tile_kv> S;
      const bool works = has_work(j0);
      if (works) multiply_K(S, 0);
      cp_async_wait<0>();
      block_sync();   // V is there; everyone has used K
      request_next();
      if (works) {
        hide_and_weigh(S, j0);
        multiply_V(S, 0);
      }
    } else if (trusts && has_maximum && all.begin <= j0 && j0 + span <= all.end) {
      if constexpr (!asks_late) request_next();
#pragma unroll 1
      for (int part = 0; part < n_parts; ++part) {
        Fragment<tile_kv> S;
        multiply_K(S, part);
        if (asks_late && part == 0) request_next();   // while the tensor cores are busy
        weigh<trusts>(S, state, rules.late_scale);
        multiply_V(S, part);
      }
    } else {
      request_next();
#pragma unroll 1
      for (int part = 0; part < n_parts; ++part) {
        const i32 j = j0 + part * tile_kv;
        if (!has_work(j)) continue;
        Fragment<tile_kv> S;
        multiply_K(S, part);
        hide_and_weigh(S, j);
        multiply_V(S, part);
      }
    }
    j0 = j_next;
    stage ^= 1;
  }

  if constexpr (is_three_tf32 && !is_careful) {
    const bool odd = any(!is_finite(O, state) || (trusts && is_beyond(state)));
    if (lane == 0) odd_warps(args).store(odd_warp(thread / 32), odd);
  } else if constexpr (trusts) {
    const bool odd = any(is_odd(O, state) || is_beyond(state));
    if (lane == 0) smem.is_odd(0, thread / 32) = odd;
  }
  take_headroom_back(O, state);
  const i64 x = opaque(blockIdx.x);   // asked again: its registers would be missing in the loop
  const QueryTile mine = tile_of(args, x / n_shares);
  using To = Choice<is_split, acc, out_elem>::type;
  if constexpr (heads_together > 1) {
    finish_heads<To>(args, mine, is_split ? x % n_shares : 0, O, state, warp_row, lane);
  } else {
    const Results results = is_split ? part_of(args, mine, x % n_shares) : results_of(args, mine);
    finish(args, mine, results, O, state, mine.i0 + warp_row, lane);
    store_O<To>(O, results.O, results.O_rows, warp_row, lane);
  }
  if constexpr (!trusts || is_three_tf32) return false;
  block_sync();   // every warp has said whether it is odd
  return any(lane < n_warps && smem.is_odd(0, lane % n_warps));
}

KERNEL(n_threads, blocks_per_sm) fwd_05_pipeline(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if constexpr (!is_careful)
    if (attend<looks_once>(args, smem)) attend<false>(args, smem);
}

KERNEL(n_threads, blocks_per_sm) fwd_05_pipeline__careful(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  if constexpr (is_careful) attend<false>(args, smem);
}
