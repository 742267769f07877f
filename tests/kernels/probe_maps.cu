// probe_maps.cu - what the tests of tensor maps launch: out <- q and dQ_sum += k through their maps.   sm_90
//
// Grid x: tile + n_tiles * (head + heads * batch).  len_q = len_k, heads = heads_k, head_dim_v = head_dim.
#include "lib/params.cuh"
#include "lib/barrier.cuh"
#include "lib/maps.cuh"
#include "lib/mbarrier.cuh"
#include "lib/positions.cuh"

struct Smem {
  Shared<elem, tile_q, 64> Q;        // as TMA writes it, not swizzled
  Shared<elem, tile_kv, 64> K;
  Shared<float, tile_kv, 32> sums;   // the first 32 columns of K
  Shared<u64, 1, 1> full;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes, "probe_maps: Smem and its row disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes, "probe_maps: MappedArgs disagrees");

KERNEL(n_threads, 1) probe_maps(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int thread = threadIdx.x;
  const i64 n_tiles = ceil_div(args.len_q, tile_q), tile = blockIdx.x % n_tiles;
  const i64 h = blockIdx.x / n_tiles % args.heads, b = blockIdx.x / n_tiles / args.heads;
  const u32 full = smem.full.address(0, 0);
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  block_sync();   // the barrier is there
  if (thread == 0) {
    mbarrier_arrive_expect(full, sizeof(smem.Q) + sizeof(smem.K));
    tma_load(smem.Q.address(0, 0), args.maps.Q, full, map_at(0, tile * tile_q, h, b));
    tma_load(smem.K.address(0, 0), args.maps.K, full, map_at(0, tile * tile_q, h, b));
  }
  mbarrier_wait(full, 0);
  for (int at = thread; at < tile_kv * 32; at += n_threads)
    smem.sums(at / 32, at % 32) = convert<float>(smem.K(at / 32, at % 32));
  fence_async_shared();
  block_sync();   // the sums are there, for TMA too
  if (thread == 0) {
    tma_reduce_add(args.maps.dQ_sum, smem.sums.address(0, 0), map_at(0, tile * tile_q, h, b));
    if (is_mapped(args, args.maps.O))
      tma_store(args.maps.O, smem.Q.address(0, 0), map_at(0, tile * tile_q, h, b));
    bulk_commit();
    bulk_wait<0>();
  }
  if (!is_mapped(args, args.maps.O))
    for (int at = thread; at < tile_q * 64; at += n_threads) {
      const i64 i = tile * tile_q + at / 64;
      if (i < args.len_q && at % 64 < args.head_dim)
        Global<elem>(args.O.data).store(index_of(args.O, b, h, i) + at % 64, smem.Q(at / 64, at % 64));
    }
}
