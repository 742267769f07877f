// bwd_05_wgmma.cu - attention backward: warpgroups multiply from shared memory, TMA fills it.   sm_90a
//
// Read after   bwd_04_pipeline.cu, fwd_07_tma.cu          Read next   bwd_06_specialize.cu
// Changes      S and dP are made transposed, keys as rows: packed, they are the A operands of dV += P^T dO
//              and dK += dS^T Q as they lie, so P never meets shared memory and dS does for dQ alone.  dQ
//              leaves by additions of 16 bytes a lane, to an array in the order of accumulators; one thread
//              asks for whole tiles
//
// Algorithm    = tiled_backward.backward.   One block: TILE_KV keys of one (sequence, key head).
//                K, V -> shared, once
//                for each query head of the group, each query tile that sees these keys:
//                  ask for the next Q, dO and rows (lse, delta)
//                  S^T = K Q^T,  dP^T = V dO^T     wgmma; each group has 64 keys
//                  P = 2^(S - lse),  dS = P (dP - delta)      registers, lib/key_rows.cuh
//                  dS -> shared
//                  dV += P^T dO,  dK += dS^T Q,  dQ = dS K    wgmma; each group has half of dQ
//                  dQ -> its sum in memory
//                dK * scale, dV -> memory          (pass_query_tiles__close makes dQ of the sums)
// Grid         x: key tile + n_tiles * (key head + heads_k * (sequence + batch * split)); packed: slots
//              (lib/positions.cuh) for tiles.  Where blocks are few, n_splits of them share a key head's
//              query heads and add to dK_sum and dV_sum.
// Shared       K [TILE_KV, .] | V | Q [2][TILE_Q, .] | dO [2] | dS [TILE_KV, TILE_Q] | lse, delta [2]
// Registers    per thread: dK HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and dP TILE_Q / 2 each, dQ, P, dS
// Bytes        per block: K, V, dK, dV once; Q, dO, rows and an addition to dQ per query tile
// Barriers     KV_full, full[2]: "it is there".  2 block_sync a step: "dS is there", "this step's tiles are
//              used"
#include "lib/params.cuh"
#include "lib/key_group.cuh"

struct Smem {
  TileK K;
  TileV V;
  TileQ Q[2];    // ring: stage = number of the query tile % 2
  TiledO dO[2][dO_parts];
  TileS dS[1];
  Shared<float, 4, tile_q> rows;         // stage 0: lse_log2, delta; stage 1
  Shared<u64, 1, 3> barriers;
  Shared<float, 1, group_warps> sums;    // of KeyGroup, for options

  DEVICE u32 full(int stage) { return barriers.address(0, stage); }
  DEVICE u32 KV_full() { return barriers.address(0, 2); }
  DEVICE bool keeps(const Walk&, i32, i32, i32, int) { return true; }   // no block mask
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "bwd_05_wgmma: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "bwd_05_wgmma: Args and launch.py disagree");
static_assert(n_threads == group_threads, "bwd_05_wgmma: two warpgroups");

// By one thread: the tile of queries where the walk stands, into a stage.
DEVICE void request(const MappedArgs& args, Smem& smem, const QueryWalk<Walk>& at, int stage) {
  const Sequence& seq = at.seq;
  const int row = static_cast<int>(seq.q_row0) + at.i0, b = static_cast<int>(seq.array_b);
  const Global<float> rows(args.workspace[SLOT_ROWS]);
  constexpr u32 rows_bytes = 2 * tile_q * sizeof(float);
  const i64 first_row = static_cast<i64>(place_of(args, seq, at.h, at.i0)) * 2 * tile_q;
  mbarrier_arrive_expect(smem.full(stage), smem.Q[0].n_bytes + dO_bytes + rows_bytes);
  smem.Q[stage].load(args.maps.Q, smem.full(stage), row, at.h, b);
  load_dO(args, smem, stage, smem.full(stage), at);
  bulk_load(smem.rows.address(2 * stage, 0),
            rows.address(first_row, rows_bytes), rows_bytes,
            smem.full(stage));
}

KERNEL(n_threads, 1) bwd_05_wgmma(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x, group = shfl(thread / 128, 0);
  const Own own = own_of(args, blockIdx.x);
  if (!own.exists) return;
  const Sequence seq = sequence_of(args, own.b);
  const Meeting meeting = meeting_of(args, seq, own.j0, false);
  QueryWalk<Walk> at(args, seq, meeting.queries, own.j0, own.h_begin, own.h_end, thread % 32);
  if (thread == 0) {
    mbarrier_init(smem.full(0), 1);
    mbarrier_init(smem.full(1), 1);
    mbarrier_init(smem.KV_full(), 1);
    mbarrier_init_fence();
  }
  block_sync();   // the barriers are there
  if (thread == 0 && at.exists()) {
    const int row = static_cast<int>(seq.k_row0) + own.j0;
    const int h_k = own.h_k, b = static_cast<int>(seq.array_b);
    mbarrier_arrive_expect(smem.KV_full(), smem.K.n_bytes + smem.V.n_bytes);
    smem.K.load(args.maps.K, smem.KV_full(), row, h_k, b);
    smem.V.load(args.maps.V, smem.KV_full(), row, h_k, b);
    request(args, smem, at, 0);
  }

  KeyGroup<Smem, 0> mine(args, smem, own, seq, meeting, group, thread % 128);
  Turns turns(args, group, thread % 128);
  if (at.exists()) mbarrier_wait(smem.KV_full(), 0);
#pragma unroll 1
  for (int n = 0; at.exists(); ++n, at.next()) {
    const int stage = n % 2;
    QueryWalk<Walk> following = at;
    following.next();
    if (thread == 0 && following.exists()) request(args, smem, following, stage ^ 1);

    mbarrier_wait(smem.full(stage), n / 2 & 1);
    mine.ask_S(stage);
    mine.ask_dP(stage);
    wgmma_wait<1>();   // S
    mine.soften(stage, at);
    wgmma_wait<0>();   // dP
    mine.differentiate(stage, at);
    mine.hide(at);
    mine.put_dS(0);
    block_sync();   // both groups' dS is there
    mine.ask_dV(stage);
    mine.ask_dK(stage);
    mine.ask_dQ(0);
    wgmma_wait<0>();
    const i64 place = place_of(args, seq, at.h, at.i0);
    if constexpr (deterministic) turns.wait(place, turn_of(args, seq, at.i0, own.j0));
    mine.add_dQ(place);
    block_sync();   // everyone has used this step's Q, dO, rows and dS: they may be overwritten
  }
  if constexpr (deterministic) turns.announce();
  mine.finish(own, seq);
}
