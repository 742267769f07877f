// cluster_share.cuh - what groups 1 and 2 of bwd_07_cluster have in common: products, dQ, the end.   sm_90a
#pragma once
#include "accumulators.cuh"
#include "cluster_block.cuh"

// A descriptor that the compiler cannot keep from one step to the next: there are too many for that.
struct Descriptor {
  u32 low, high;
  DEVICE explicit Descriptor(u64 first)
      : low(opaque(static_cast<int>(first))), high(static_cast<u32>(first >> 32)) {}
  DEVICE u64 at(u32 step) const { return static_cast<u64>(high) << 32 | (low + step); }   // step: 16 bytes
};
// 64 keys x n columns += A^T B: A packed in registers, B the 64 rows of a tile.
template <int n, class Tile> DEVICE void add_product(float (&sum)[n], const Words& A, Tile& B) {
  const Descriptor rows(B.descriptor_MN(0));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<elem, 1>(sum, A[k], rows.at(k * Tile::line_bytes), true);
  wgmma_commit();
}
// 64 keys x 64 queries = A B^T over the columns of both, or += where it goes on.  A's first steps from
// registers.
template <int steps, class Tile>
DEVICE void product(float (&result)[n_scores], Tile& A, const u32 (&held)[steps][4], int n_held, Tile& B,
                    bool goes_on = false) {
  const Descriptor keys(A.descriptor_K(0)), queries(B.descriptor_K(0));
  if (!is_plain && !goes_on)   // else what branches left of the last result gets in the way (C7514)
#pragma unroll
    for (int at = 0; at < n_scores; ++at) result[at] = 0;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Tile::cols / 16; ++k) {
    const u32 step = (k / 4 * Tile::panel_bytes + k % 4 * 32) / 16;
    if (k < n_held) wgmma<elem>(result, held[k < steps ? k : 0], queries.at(step), goes_on || k > 0);
    else wgmma<elem>(result, keys.at(step), queries.at(step), goes_on || k > 0);
  }
  wgmma_commit();
}

// The first steps of a tile as product takes them, the warp's 16 rows.
template <int steps, class Tile> DEVICE void hold(u32 (&held)[steps][4], int n_held, Tile& tile, int thread) {
#pragma unroll
  for (int k = 0; k < steps; ++k)
    if (k < n_held)
      ldmatrix_x4(held[k], tile.address(thread / 32 * 16 + thread % 16, 2 * k + thread % 32 / 16));
}

// Columns [first_col, + 2 n) of dQ: what they are made of, and where they go.
struct DqShare {
  const Args& args;
  Smem& smem;
  i32 step, step_peer;   // from K's descriptor, K_peer's, to that of the columns: 16 bytes
  i32 first;             // dQ_index of this lane's first numbers in place 0

  DEVICE DqShare(const Args& args, Smem& smem, int first_col, int thread)
      : args(args), smem(smem) {
    const int peer_col = first_col - first_peer_col(cluster_rank());
    step = (first_col / 64 * smem.K.panel_bytes + first_col % 64 * 2) / 16;
    step_peer = (peer_col / 64 * smem.K_peer.panel_bytes + peer_col % 64 * 2) / 16;
    first = static_cast<i32>(dQ_index(0, thread / 32, first_col / 8, thread % 32));
  }
  // dQ = dS K of the n-th step, over the keys of both blocks.
  template <int size> DEVICE void start(float (&dQ)[size], u32 n) {
    wait_full(smem.dS_full, n);   // dS of own keys is stored, that of the peer's has landed
    const Descriptor dS(smem.dS[n % 2][0].descriptor_MN(0));   // the peer's follows: 8 more k16 steps
    const Descriptor K(smem.K.descriptor(step, smem.K.panel_bytes));
    const Descriptor K_peer(smem.K_peer.descriptor(step_peer, smem.K_peer.panel_bytes));
    constexpr u32 k16 = 128;   // 16 rows of a panel, in 16 bytes
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma<elem, 1, 1>(dQ, dS.at(k * k16), k < 4 ? K.at(k * k16) : K_peer.at((k - 4) * k16), k > 0);
    wgmma_commit();
  }
  // dQ of the n-th step, the last of a tile of keys, is complete: dS and the keys may be overwritten.
  DEVICE void release(u32 n) {
    if (threadIdx.x % 128 != 0) return;
    arrive_at_both(smem.dS_empty, n);
    mbarrier_arrive(at(smem.keys_empty, 0));
  }
  // The sums += dQ of the n-th step.
  template <int size> DEVICE void add(const float (&dQ)[size], u32 n) {
    const Global<float> sums(args.workspace[SLOT_DQ]);
    const i64 place = smem.steps.as<Step>(n % n_steps, 0).place;
    const i64 index = place * (tile_q * head_dim_tile) + first;
    if constexpr (deterministic) wait_full(smem.may_add, n);   // it is the cluster's turn
#pragma unroll
    for (int c = 0; c < size / 4; ++c)
      sums.add_as(index + c * 128, Vec16<float>{{dQ[4 * c], dQ[4 * c + 1], dQ[4 * c + 2], dQ[4 * c + 3]}});
    if constexpr (deterministic) {
      warp_sync();   // the warp has added
      if (first / 4 % 32 == 0) mbarrier_arrive(at(smem.added, n));
    }
  }
};

// The n-th tile of keys of a cluster has landed: K, and where rows may not exist all of it, with zeros there.
DEVICE void take_keys(const Args& args, Smem& smem, const Owner& own, u32 n) {
  wait_full(smem.K_full, n);   // K has landed
  if constexpr (cleans_keys) {
    wait_full(smem.V_full, n);   // V and the peer's keys have landed: nothing overwrites the zeros
    const i32 end = own.tile.seq.len_k;
    const auto rows = [&](i32 j0) { return clamp(end - j0, 0, own_keys); };
    smem.K.clear_rows(rows(own.j0), threadIdx.x - 128, 256);
    smem.K_peer.clear_rows(rows(own.tile.j0 + own_keys * (1 - own.rank)), threadIdx.x - 128, 256);
    fence_async_shared();
    mbarrier_arrive(at(smem.keys_clean, n));
    wait_full(smem.keys_clean, n);   // keys that do not exist are zeros, also to wgmma
  }
}

// A group's way through the steps of a tile of keys, of which n is the first.  begin(n): up to S or dP;
// go_on(n): from there to that of the next step; finish(n): the last, and what the tile has summed.
template <class Group> DEVICE void walk_steps(Group& group, u32& n) {
  group.begin(n);
  if (group.step.is_last()) {   // apart: the compiler then moves no sums while products run
    group.finish(n);
    return;
  }
  group.template go_on<true>(n++);
#pragma unroll 1
  while (!group.step.is_last()) group.template go_on<false>(n++);
  group.finish(n);
}
// Through the tiles of its cluster: how many steps there were.
template <class Group> DEVICE u32 walk_tiles(Group& group) {
  u32 n = 0;
  group.read_step(0);
  if constexpr (stays) {
    for (; group.step.exists(); group.read_step(++n)) walk_steps(group, n);
  } else if (group.step.exists()) {
    walk_steps(group, n);
    ++n;
  }
  return n;
}

// target = sum * factor, the rows of the block's keys; or total += sum, where clusters share them.
template <int n>
DEVICE void store_keys(const Args& args, u32 tile, const float (&sum)[n], float factor, const Tensor& target,
                       const Tensor& total, i64 dim, int thread) {
  const Owner own = owner_of(args, tile);
  const Sequence& seq = own.tile.seq;
  const int row0 = thread / 32 * 16, lane = thread % 32;
  const auto rows_of = [&](const Tensor& tensor, i32 end) {
    return tile_source(tensor, seq.array_b, seq.k_row0, own.tile.h, own.j0, end, 0, dim);
  };
  if constexpr (is_split) {
    const TileSource rows = rows_of(total, seq.len_k);
#pragma unroll
    for (int at = 0; at < n; ++at) {   // one by one: exchanges between lanes serialise the products (C7514)
      const int row = row0 + lane / 4 + at / 2 % 2 * 8, d = at / 4 * 8 + lane % 4 * 2 + at % 2;
      if (row < rows.rows && d < rows.cols)
        Global<float>(total.data).add(rows.base + row * rows.stride + d, sum[at]);
    }
  } else {
    store_rows<out_elem>(sum, factor, target.data, rows_of(target, seq.rows_k), row0, seq.len_k - own.j0,
                         lane);
  }
}

// 32 numbers of a thread through smem.P, from 16-byte row `first` on.
DEVICE void give(Smem& smem, const float (&x)[n_scores], int first, int thread) {
#pragma unroll
  for (int c = 0; c < 8; ++c)
    smem.P.as<Vec16<float>>((first + c) * 128 + thread, 0) = {
        {x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]}};
}
DEVICE void take(Smem& smem, float (&x)[n_scores], int first, int thread) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const Vec16<float> four = smem.P.as<Vec16<float>>((first + c) * 128 + thread, 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[4 * c + e] = four.item[e];
  }
}
