// fwd_06_wgmma.cu - attention forward, a warpgroup multiplies straight from shared memory.   sm_90a
//
// Read after   fwd_05_pipeline.cu          Read next   fwd_07_tma.cu
// Changes      wgmma for ldmatrix and mma.sync: four warps together multiply 64 rows, and Q, K and V go from
//              shared memory to the tensor cores without passing registers.  The core only, head_dim to 128
//
// Why          mma.sync reads its operands from registers: every warp loads all of K and V for its rows,
//              and spends an instruction on every 16 x 8 piece.  wgmma reads them where they lie, once for
//              64 rows, and runs by itself: warps could do something else (not yet: they wait for S and O)
// Algorithm    = tiled.forward.   One block: TILE_Q rows of one (batch, head); 64 of them are one warpgroup's
//                ask for Q and the first K, V
//                for each key tile that some row may see:
//                  wait; ask for the next K, V
//                  S = Q K^T             wgmma, both from shared memory; float32 in registers
//                  S <- score, mask      lib/fragments.cuh; tiles visible as a whole are not tested
//                  m, l, O <- rescale
//                  O += P V              wgmma, P = S packed to 16 bits in registers, V as it lies
//                O / l -> O_gmem      m + log l -> lse
// Grid         x: tiles by sections of heads whose K and V fit the L2 cache, the heaviest of a section first
// Tile         TILE_Q x TILE_KV x HEAD_DIM; a warpgroup owns 64 rows, a quad of lanes shares a row
// Shared       in 16 bits, as panels of 64 columns (lib/panels.cuh): Q [TILE_Q, HEAD_DIM] |
//              K [2][TILE_KV, HEAD_DIM] | V [2][TILE_KV, HEAD_DIM_V]
// Registers    per thread: S TILE_KV / 2, O HEAD_DIM_V / 2 floats, P TILE_KV / 4 words.  No spills
// Bytes        per block: Q once, K and V of its key range, O once
// Barriers     1 block_sync a key tile: "tile j is there, for wgmma too, and everyone has used tile j - 1"
// Limiter      the tensor cores wait for the softmax, and the softmax for them; 256 threads copy
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/fragments.cuh"
#include "lib/panels.cuh"
#include "lib/sections.cuh"

struct Smem {
  PanelTile<tile_q, head_dim_tile> Q;
  PanelTile<tile_kv, head_dim_tile> K[2];     // ring: stage = number of the tile % 2
  PanelTile<tile_kv, head_dim_v_tile> V[2];   // same stage as its K
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "fwd_06_wgmma: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(Args) == args_bytes, "fwd_06_wgmma: Args and launch.py disagree");

// request_tile of matrices.cuh for panels: 8 threads stand side by side on a line of a panel and go down the
// rows in whole periods of the swizzle, so that every copy lies at a constant distance from the first.
template <class Tile>
DEVICE void request_panels(Tile& tile, const void* data, const TileSource& source, int thread) {
  if (!source.by_vectors) return load_tile(tile, data, source, thread);
  constexpr int step = n_threads / 8;
  static_assert(Tile::panel_cols == 64 && Tile::rows % step == 0 && step % 8 == 0, "request_panels: steps");
  const Global<elem> from(const_cast<void*>(data));
  const int row0 = opaque(thread) / 8, chunk0 = thread % 8;
  const u32 target = tile.address(row0, chunk0);
  i64 index = source.base + row0 * source.stride + chunk0 * 8;
#pragma unroll
  for (int down = 0; down < Tile::rows; down += step, index += step * source.stride)
#pragma unroll
    for (int p = 0; p < Tile::n_panels; ++p) {
      const bool is_there = row0 + down < source.rows && p * 64 + chunk0 * 8 < source.cols;
      const u32 n_bytes = is_there ? 16 : 0;   // zeros fill the rest
      cp_async(target + p * Tile::panel_bytes + down * 128, from.address(index + p * 64, n_bytes), n_bytes);
    }
}

KERNEL(n_threads, 1) fwd_06_wgmma(const __grid_constant__ Args args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp_row = thread / 32 * 16, group_row = thread / 128 * 64;   // the first of its rows in the tile
  const QueryTile own = query_tile_in_section<elem>(args, blockIdx.x, tile_q);
  const Sequence& seq = own.seq;
  const i32 i0 = own.i0, i1 = smallest(i0 + tile_q, seq.len_q);
  const Range keys = visible_keys(args, seq, i0, i1 - 1);
  const Rules rules = rules_of(args, seq, own.h);
  const auto is_kept = [](i32, i32) { return true; };
  const auto request_KV = [&](i32 j, int stage) {
    request_panels(smem.K[stage], args.K.data, source_of_K(args, own, j, keys.end), thread);
    request_panels(smem.V[stage], args.V.data, source_of_V(args, own, j, keys.end), thread);
    cp_async_commit();
  };

  Fragment<head_dim_v_tile> O;
  O.clear();
  RowState state = no_keys_yet();

  i32 j0 = keys.begin / tile_kv * tile_kv;
  int stage = 0;
  if (j0 < keys.end) {
    request_panels(smem.Q, args.Q.data, source_of_Q(args, own, i1), thread);
    request_KV(j0, stage);
  }
#pragma unroll 1
  for (; j0 < keys.end; j0 += tile_kv, stage ^= 1) {
    cp_async_wait<0>();
    fence_async_shared();   // what this thread has copied can be seen by wgmma
    block_sync();   // tile j0 (and Q) is there; everyone has used the one before: its stage may be refilled
    if (j0 + tile_kv < keys.end) request_KV(j0 + tile_kv, stage ^ 1);

    Fragment<tile_kv> S;
    wgmma_fence();   // S is written anew by wgmma
#pragma unroll
    for (int k = 0; k < head_dim_tile / 16; ++k)
      wgmma<elem>(registers_of(S), smem.Q.descriptor_K(k, group_row), smem.K[stage].descriptor_K(k), k > 0);
    wgmma_commit();
    wgmma_wait<0>();   // S is there

    if (is_fully_visible(args, seq, i0, i0 + tile_q, j0, j0 + tile_kv))
      modify_scores<false>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    else
      modify_scores<true>(args, seq, rules, S, i0 + warp_row, j0, lane, is_kept);
    float shrink[n_rows];
    soften(S, state, shrink, rules.late_scale);
    rescale(O, shrink);

    u32 P[tile_kv / 16][4];
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k) repack(P[k], S.at[0][2 * k], S.at[0][2 * k + 1]);
    wgmma_fence();   // P and O were written by ordinary code
#pragma unroll
    for (int k = 0; k < tile_kv / 16; ++k)
      wgmma<elem, 1>(registers_of(O), P[k], smem.V[stage].descriptor_MN(k), true);
    wgmma_commit();
    wgmma_wait<0>();   // O is there, K and V are used
  }

  const Results results = results_of(args, own);
  finish(args, own, results, O, state, i0 + warp_row, lane);
  store_fragment<out_elem>(O, results.O, results.O_rows, warp_row, lane);
}
