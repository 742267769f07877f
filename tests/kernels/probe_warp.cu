// probe_warp.cu - one kernel per group of warp and block instructions (sm_80): tests/test_instructions.py
// checks each.
#include "lib/barrier.cuh"
#include "lib/cp_async.cuh"
#include "lib/ldmatrix.cuh"
#include "lib/memory.cuh"
#include "lib/mma.cuh"
#include "lib/warp.cuh"

struct Probe {
  void* arrays[8];
  int numbers[8];
};

// out[k][lane] for k = 0..9; x: 32 floats
KERNEL(32, 1) probe_shuffles(const __grid_constant__ Probe p) {
  Global<float> x(p.arrays[0]), out(p.arrays[1]);
  const int lane = threadIdx.x;
  const float mine = x.load(lane);
  out.store(lane, shfl(mine, 5));
  out.store(32 + lane, shfl_xor(mine, 3));
  out.store(64 + lane, shfl_down(mine, 4));
  out.store(96 + lane, shfl_up(mine, 2));
  out.store(128 + lane, warp_sum(mine));
  out.store(160 + lane, warp_max(mine));
  out.store(192 + lane, warp_min<4>(mine));
  out.store(224 + lane, static_cast<float>(ballot(mine > 0) & 0xffff));
  out.store(256 + lane, any(mine > 2) ? 1 : 0);
  out.store(288 + lane, all(mine > -2) ? 1 : 0);
  const double wide = shfl_xor(static_cast<double>(mine) * 3, 1);
  out.store(320 + lane, static_cast<float>(wide));
}

struct SmemBarriers { Shared<int, 4, 32> cells; };

// Warps 0, 1 fill, arrive; warps 2, 3 wait, and answer: named barriers as a pair of flags.  out: 64 ints
KERNEL(128, 1) probe_barriers(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemBarriers, smem);
  Global<int> out(p.arrays[0]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) smem.cells(2, lane) = 7;
  block_sync();
  for (int round = 0; round < 3; round++) {
    if (warp < 2) {
      if (round > 0) barrier_sync(2, 128);
      smem.cells(warp, lane) = 100 * round + 10 * warp + smem.cells(2, lane);
      barrier_arrive(1, 128);
    } else {
      barrier_sync(1, 128);
      out.add((warp - 2) * 32 + lane, smem.cells(warp - 2, 31 - lane));
      if (round < 2) barrier_arrive(2, 128);
    }
  }
}

// out[0]: sum of what fetch_add returned; counter: 1 int
KERNEL(64, 1) probe_atomics(const __grid_constant__ Probe p) {
  Global<int> counter(p.arrays[0]), out(p.arrays[1]);
  Global<float> total(p.arrays[2]);
  out.add(0, counter.fetch_add(0, 2));
  total.add(0, 0.5f);
}

struct alignas(16) Four { float item[4]; };

// Blocks add their number + 1 to total (4 floats) one after another, by turns: turn ends at the number of blocks.
// order[b]: what block b found in total[0].
KERNEL(32, 1) probe_turns(const __grid_constant__ Probe p) {
  Global<int> turn(p.arrays[0]);
  Global<float> total(p.arrays[1]), order(p.arrays[2]);
  const int b = blockIdx.x;
  if (threadIdx.x == 0) {
    turn.wait_for(0, b);
    order.store(b, total.load(0));
    const float one = static_cast<float>(b + 1);
    total.add_as(0, Four{{one, 2 * one, 3 * one, 4 * one}});
    turn.add_release(0, 1);
  }
}

struct SmemMatrices { Shared<u16, 32, 16> in; Shared<u16, 32, 16> out; };

// x: (32, 16) u16 = matrices of 8 rows in columns 0-7 and 8-15.  out: (5, 32, 4) registers, then (32, 16) by
// stmatrix's reader
KERNEL(32, 1) probe_ldmatrix(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemMatrices, smem);
  Global<u16> x(p.arrays[0]);
  Global<u32> out(p.arrays[1]);
  const int lane = threadIdx.x;
  for (int c = 0; c < 16; c++) smem.in(lane, c) = x.load(lane * 16 + c);
  warp_sync();
  const u32 row = smem.in.address(lane, 0), column = smem.in.address(lane % 16, 8 * (lane / 16));
  u32 r[4];
  ldmatrix_x4(r, row);
  for (int i = 0; i < 4; i++) out.store(lane * 4 + i, r[i]);
  ldmatrix_x4_trans(r, row);
  for (int i = 0; i < 4; i++) out.store(128 + lane * 4 + i, r[i]);
  ldmatrix_x4(r, column);
  for (int i = 0; i < 4; i++) out.store(256 + lane * 4 + i, r[i]);
  for (int i = 0; i < 4; i++) out.store(384 + lane * 4 + i, movmatrix(r[i]));
  u32 two[2], one;
  ldmatrix_x2(two, row);
  ldmatrix_x1(one, row);
  out.store(512 + lane * 4, two[0]);
  out.store(512 + lane * 4 + 1, two[1]);
  out.store(512 + lane * 4 + 2, one);
  ldmatrix_x2_trans(two, row);
  out.store(512 + lane * 4 + 3, two[1]);
}

// A (16, 16), B (16, 8) of 16 bits, row-major; D (16, 8) float.  numbers[0]: 0 f16, 1 bf16, 2 f16 k8
KERNEL(32, 1) probe_mma(const __grid_constant__ Probe p) {
  Global<u16> A(p.arrays[0]), B(p.arrays[1]);
  Global<float> D(p.arrays[2]);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  auto pair_a = [&](int row, int k) {
    return A.load(row * 16 + k) | static_cast<u32>(A.load(row * 16 + k + 1)) << 16;
  };
  auto pair_b = [&](int k) { return B.load(k * 8 + g) | static_cast<u32>(B.load((k + 1) * 8 + g)) << 16; };
  float d[4] = {1, 2, 3, 4};
  const u32 a[4] = {pair_a(g, 2 * t), pair_a(g + 8, 2 * t), pair_a(g, 2 * t + 8), pair_a(g + 8, 2 * t + 8)};
  const u32 b0 = pair_b(2 * t), b1 = pair_b(2 * t + 8);
  if (p.numbers[0] == 0) mma_k16<f16>(d, a, b0, b1);
  else if (p.numbers[0] == 1) mma_k16<bf16>(d, a, b0, b1);
  else mma_f16_k8(d, a[0], a[1], b0);
  for (int i = 0; i < 4; i++) D.store((g + 8 * (i / 2)) * 8 + 2 * t + i % 2, d[i]);
}

// A (16, 8), B (8, 8) float; D (16, 8)
KERNEL(32, 1) probe_tf32(const __grid_constant__ Probe p) {
  Global<float> A(p.arrays[0]), B(p.arrays[1]), D(p.arrays[2]);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float d[4] = {};
  auto of_a = [&](int row, int k) { return to_tf32(A.load(row * 8 + k)); };
  const u32 a[4] = {of_a(g, t), of_a(g + 8, t), of_a(g, t + 4), of_a(g + 8, t + 4)};
  mma_tf32_k8(d, a, to_tf32(B.load(t * 8 + g)), to_tf32(B.load((t + 4) * 8 + g)));
  for (int i = 0; i < 4; i++) D.store((g + 8 * (i / 2)) * 8 + 2 * t + i % 2, d[i]);
}

// x: 2n floats -> bits of f16 and bf16 pairs, n each
KERNEL(64, 1) probe_pack(const __grid_constant__ Probe p) {
  Global<float> x(p.arrays[0]);
  Global<u32> out(p.arrays[1]);
  for (int i = threadIdx.x; i < p.numbers[0]; i += 64) {
    out.store(i, pack<f16>(x.load(2 * i), x.load(2 * i + 1)));
    out.store(p.numbers[0] + i, pack<bf16>(x.load(2 * i), x.load(2 * i + 1)));
  }
}

struct SmemCopies { Shared<u8, 4, 512> stages; };

// x: (6, 512) bytes through 4 stages -> out; tile j's thread t copies (t % 17) of 16 bytes, the rest are
// zeros
KERNEL(32, 1) probe_cp_async(const __grid_constant__ Probe p) {
  SHARED_MEMORY(SmemCopies, smem);
  Global<u8> x(p.arrays[0]), out(p.arrays[1]);
  const int t = threadIdx.x, n = 6;
  auto request = [&](int j) {
    const u32 n_valid = (t + j) % 17;
    if (j < n) cp_async(smem.stages.address(j % 4, 16 * t), x.address(512 * j + 16 * t, n_valid), n_valid);
    cp_async_commit();
  };
  for (int j = 0; j < 3; j++) request(j);
  for (int j = 0; j < n; j++) {
    cp_async_wait<2>();
    warp_sync();   // tile j is complete; tile j - 1, whose stage request(j + 3) overwrites, has been read
    request(j + 3);
    for (int i = 0; i < 16; i++) out.store(512 * j + 32 * i + t, smem.stages(j % 4, 32 * i + t));
  }
}
