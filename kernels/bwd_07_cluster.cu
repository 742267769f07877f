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
// Grid         x: rank + 2 * cluster, as many as there are SMs.  A cluster stays: its first tile of keys has
//              its number, the next ones a counter in memory's.  Tiles of one head are taken together, they
//              read the same Q and dO.  deterministic: a cluster per tile, which ends with it
//              Few tiles: n_splits clusters share a key head's query heads and add to dK_sum and dV_sum.
// Groups       0 (lib/cluster_loader.cuh): a warp loads Q and dO; one makes zeros of rows that do not exist;
//              one chooses tiles of keys and loads them, or two keep the turns of a deterministic backward
//              1 weights (lib/cluster_weights.cuh)      2 gradients (lib/cluster_gradients.cuh)
// Shared       (lib/cluster_block.cuh) K, V [64, .] | K_peer [64, 128] | Q [2][64, .] | dO [N_STAGES][64, .]
//              | dS [2][own, peer][64, 64] | P [2], as registers hold it | lse, delta | steps, tiles
//              | barriers
// Registers    per thread at 256: dV or dK 128, S or dP 32, dQ 32, P or dS packed 16; loader 24, groups 240
//              No spills without options that change or sum scores; with them up to 1.6 KB, where all meet
// Bytes        per block: K, V, dK, dV once; half of Q and dO, an addition to half of dQ per query tile
// Barriers     <operand>_full: landed.  Q_empty, dO_empty, dS_empty: both groups of both blocks have used it.
//              keys_empty: both groups of this block have.  keys_clean: both have written zeros where there
//              are no keys.  S_read, dP_read: lse and the step, delta have been read.  P_full, P_empty:
//              between the groups.  is_told, asked: between chooser and loader.  may_add, added,
//              announced, step_told: turns
//              Where ordinary accesses are handed over every lane arrives, not one after warp_sync(): as
//              fast, and what racecheck of compute-sanitizer follows.
//              The cluster's barrier publishes nothing (relaxed): what blocks send each other has been waited
//              for by mbarriers before they leave.
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
  const int lane = thread % 32;
  if (threadIdx.x == 32) init_barriers(smem);
  cluster_arrive_relaxed();   // the barriers are ready
  if (threadIdx.x == 32 && asks_early(args)) load_keys(args, smem, owner_of(args, blockIdx.x / 2));

  if (group == 0) {
    registers_shrink<24>();
    if (thread < 32) {
      Loader{args, smem, lane, 0}.run();
    } else {
      cluster_wait();   // as the loader does
      if (cleans_queries && thread < 64) clean_queries(args, smem, lane);
      else if (stays && thread / 32 == 2) Chooser{args, smem, lane}.run();
      else if (deterministic && thread / 32 == 2) wait_for_turns(args, smem, lane);
      else if (deterministic && thread / 32 == 3) announce_turns(args, smem, lane);
    }
  } else {
    registers_grow<240>();
    cluster_wait();   // the barriers of both blocks are ready
    if (group == 1) WeightsGroup(args, smem, thread).run();
    else GradientsGroup(args, smem, thread).run();
  }
  warp_sync();                // the warp is together
  cluster_arrive_relaxed();   // all that the peer sends has arrived
  cluster_wait();             // nobody reaches into a block that has left
}
