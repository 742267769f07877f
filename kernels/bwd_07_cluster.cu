// bwd_07_cluster.cu - attention backward for head_dim up to 256: two blocks share Q and dO.   sm_90a
//
// Read after   bwd_06_specialize.cu       Read next   nothing: the last backward rung
// Changes      registers hold dK and dV of 64 keys at head_dim 256, not of 128.  So a cluster of two blocks
//              takes 128 keys, and shares what would double: Q and dO are loaded once for both, each block
//              makes dQ of all 128 keys, but half of the columns, and the warpgroups divide the products and
//              not the keys
//
// Algorithm    = tiled_backward.backward.   One cluster: 128 keys of one (sequence, key head), 64 a block.
//                K, V -> shared, once; and of the peer's K the columns whose dQ this block makes
//                for each query head of the group, each tile of 64 queries that sees these keys:
//                  weights   S^T = K Q^T,   P = 2^(S - lse)            dV += P^T dO     P -> the other group
//                  gradients dP^T = V dO^T, dS = P (dP - delta)        dK += dS^T Q     dS -> both blocks
//                  both      dQ sums += dS K, one tile late: its columns are shared out among the four
//                dK * scale, dV -> memory                (pass_query_tiles__close makes dQ of the sums)
// Grid         x: rank + 2 * (tile of 128 keys + tiles * (sequence, key head)): clusters of one head run
//              together, they read the same Q and dO
//              Few clusters: n_splits of them share a key head's query heads and add to dK_sum and dV_sum.
// Groups       0 (lib/cluster_loader.cuh): a warp loads; one makes zeros of rows that do not exist; two keep
//              the turns of a deterministic backward      1 weights (lib/cluster_weights.cuh)
//              2 gradients (lib/cluster_gradients.cuh)
// Shared       (lib/cluster_block.cuh) K, V [64, .] | K_peer [64, 128] | Q [2][64, .] | dO [N_STAGES][64, .]
//              | dS [2][own, peer][64, 64] | P [2], as registers hold it | lse, delta | steps | barriers
// Registers    per thread at 256: dV or dK 128, S or dP 32, dQ 32, P or dS packed 16; loader 24, groups 240
//              No spills without options that change or sum scores; with them up to 1.6 KB, where all meet
// Bytes        per block: K, V, dK, dV once; half of Q and dO, an addition to half of dQ per query tile
// Barriers     <operand>_full: landed.  Q_empty, dO_empty, dS_empty: both groups of both blocks have used it.
//              S_read, dP_read: lse and the step, delta have been read.  P_full, P_empty, by number: between
//              the groups.  may_add, added, announced: turns
//              The cluster's barrier publishes nothing (relaxed): what blocks send each other has been waited
//              for by mbarriers before they leave.
//              S_read, dP_read: lane 0 arrives after warp_sync(), so what the other lanes read comes before
//              the next copy of lse and delta.  compute-sanitizer does not follow that: racecheck names these
//              reads and those copies, and nothing where every lane arrives
// Tried        kernels/ATTEMPTS.md
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/cluster_gradients.cuh"
#include "lib/cluster_loader.cuh"
#include "lib/cluster_weights.cuh"

static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes,
              "bwd_07_cluster: Smem and its row in cuflash/rows_cluster.py disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes,
              "bwd_07_cluster: Args and launch.py disagree");

CLUSTER_KERNEL(n_threads, 1, 2, bwd_07_cluster)(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int group = shfl(static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  if (threadIdx.x == 32) init_barriers(smem);
  cluster_arrive_relaxed();   // the barriers are ready
  const Owner own = owner_of(args);
  if (threadIdx.x == 32 && own.tile.exists) load_keys(args, smem, own);
  if (!own.tile.exists) {   // in both blocks of the cluster
    cluster_wait();
    previous_kernel_wait();
    return;
  }

  if (group == 0) {
    registers_shrink<24>();
    const int lane = thread % 32;
    if (thread < 32) {
      load_operands(args, smem, own, lane);
    } else {
      cluster_wait();   // as load_operands does
      if (cleans_queries && thread < 64) clean_queries(smem, own.tile.seq, lane);
      else if (deterministic && thread / 32 == 2) wait_for_turns(args, smem, own, lane);
      else if (deterministic && thread / 32 == 3) announce_turns(args, smem, own, lane);
    }
    warp_sync();   // the warp is together
    cluster_arrive_relaxed();
  } else {
    registers_grow<240>();
    cluster_wait();   // the barriers of both blocks are ready
    wait_full(smem.K_full, 0);   // K has landed
    if constexpr (cleans_keys) {
      wait_full(smem.V_full, 0);   // V and the peer's keys have landed: nothing overwrites the zeros
      const i32 end = own.tile.seq.len_k;
      const auto rows = [&](i32 j0) { return clamp(end - j0, 0, own_keys); };
      smem.K.clear_rows(rows(own.j0), threadIdx.x - 128, 256);
      smem.K_peer.clear_rows(rows(own.tile.j0 + own_keys * (1 - own.rank)), threadIdx.x - 128, 256);
      fence_async_shared();
      barrier_sync(KEYS_ARE_CLEAN, 256);   // keys that do not exist are zeros, also to wgmma
    }
    if (group == 1) WeightsGroup(args, smem, own, thread).run();
    else GradientsGroup(args, smem, own, thread).run();
  }
  cluster_wait();   // nobody reaches into a block that has left
}
