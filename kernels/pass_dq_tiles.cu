// pass_dq_tiles.cu - dQ from the sums that bwd_04_pipeline leaves as its warps hold them.   sm_80 and later
//
// Read after   bwd_04_pipeline.cu
// Algorithm    dQ = dQ_tiles * scale, one block per query tile, with that kernel's tiles and warps: a thread
//              reads the numbers of its own place and stores them in the rows of dQ
// Grid         x: query head + heads * slot, slot: positions.cuh
// Bytes        dQ_tiles once, whole tiles; dQ once
#include "lib/params.cuh"
#include "lib/mma_gradient.cuh"

KERNEL(n_threads, 1) pass_dq_tiles(const __grid_constant__ Args args) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const QueryTile own = query_tile_of(args, blockIdx.x, tile_q);
  if (!own.exists) return;
  const i64 tile_number = query_tile_number(args, own.seq, own.h, own.i0);
  const i32 existing = own.seq.len_q - own.i0;
  for (int d0 = 0; d0 < head_dim_tile; d0 += step_d) {
    OfQ dQ;
    load_pieces(dQ, Global<float>(args.workspace[SLOT_DQ]), dQ_index(tile_number, d0), thread);
    store_share<out_elem>(dQ, static_cast<float>(args.scale), args.dQ.data,
                          query_rows(args.dQ, own.seq, own.h, own.i0, own.seq.rows_q, args.head_dim, d0),
                          existing, warp, lane);
  }
}
