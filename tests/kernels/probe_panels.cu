// probe_panels.cu - O = (Q K^T) V of one tile through lib/panels.cuh: tests/test_panels.py checks it.
#include "lib/barrier.cuh"
#include "lib/fragments.cuh"
#include "lib/mbarrier.cuh"
#include "lib/panels.cuh"

struct Probe {
  TensorMap maps[2];
  void* arrays[8];
  int numbers[8];
};

template <int dim> struct SmemTiles {
  PanelTile<64, dim> Q, K, V;
  Shared<u64, 1, 1> full;
};

// maps[0]: Q, K, V as heads 0, 1, 2 of [1, 3, 64, dim].  maps[1]: O [1, 1, 64, dim].  numbers[0]: rows of V
// that count.  The product S is rounded to 16 bits, as P is.
template <int dim> DEVICE void multiply_twice(const Probe& p) {
  using Tiles = SmemTiles<dim>;
  SHARED_MEMORY(Tiles, smem);
  const int thread = threadIdx.x, lane = thread % 32;
  const u32 full = smem.full.address(0, 0);
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  block_sync();   // the barrier is there
  if (thread == 0) {
    mbarrier_arrive_expect(full, 3 * smem.Q.n_bytes);
    smem.Q.load(p.maps[0], full, 0, 0, 0);
    smem.K.load(p.maps[0], full, 0, 1, 0, evict_last);
    smem.V.load(p.maps[0], full, 0, 2, 0);
  }
  mbarrier_wait(full, 0);
  smem.V.clear_rows(p.numbers[0], thread, 128);
  fence_async_shared();
  block_sync();   // V's cleared rows are there

  Fragment<64> S;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < dim / 16; ++k)
    wgmma<elem>(registers_of(S), smem.Q.descriptor_K(k), smem.K.descriptor_K(k), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  u32 P[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) repack(P[k], S.at[0][2 * k], S.at[0][2 * k + 1]);
  Fragment<dim> O;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<elem, 1>(registers_of(O), P[k], smem.V.descriptor_MN(k), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  block_sync();   // everyone has used Q: O may take its place
  store_panels<elem>(O, smem.Q, thread / 32 * 16, lane);
  fence_async_shared();
  block_sync();   // O is there as a whole
  if (thread == 0) {
    smem.Q.store(p.maps[1], 0, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
  }
}
KERNEL(128, 1) probe_panels_64(const __grid_constant__ Probe p) { multiply_twice<64>(p); }
KERNEL(128, 1) probe_panels_80(const __grid_constant__ Probe p) { multiply_twice<80>(p); }
KERNEL(128, 1) probe_panels_96(const __grid_constant__ Probe p) { multiply_twice<96>(p); }
KERNEL(128, 1) probe_panels_128(const __grid_constant__ Probe p) { multiply_twice<128>(p); }
KERNEL(128, 1) probe_panels_256(const __grid_constant__ Probe p) { multiply_twice<256>(p); }
