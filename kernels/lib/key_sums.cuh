// key_sums.cuh - dK and dV of a block's keys: in the registers of its warps while it walks over the queries.
#pragma once
#include "mma_gradient.cuh"
#include "tf32_shares.cuh"

using OfK = Share<tile_kv, head_dim_tile>;
using OfV = Share<tile_kv, head_dim_v_tile>;

// Every warp has a share of both.  An operand is read by fewer warps where half of them make dK alone and the
// other half dV: their shares are twice as wide.  Chains of TF32 products have no registers for that, nor
// have 96 keys at head_dim 96 and 192.
constexpr bool splits_warps = head_dim_tile == head_dim_v_tile && sizeof(elem) == 2 && kept_floats <= 128;

// dK * scale or dV -> memory; of a block that shares its keys with others, added to the sums there.
template <class Part>
DEVICE void store_keys(Part& part, bool is_dK, const Args& args, const KeyTile& own, bool is_shared, int warp,
                       int lane) {
  const i64 dim = is_dK ? args.head_dim : args.head_dim_v;
  const Sequence& seq = own.seq;
  if (is_shared) {
    const Tensor& sum = is_dK ? args.dK_sum : args.dV_sum;
    add_share(part, sum.data, key_rows(sum, seq, own.h, own.j0, seq.len_k, dim), warp, lane);
  } else {
    const Tensor& to = is_dK ? args.dK : args.dV;
    store_share<out_elem>(part, is_dK ? static_cast<float>(args.scale) : 1.f, to.data,
                          key_rows(to, seq, own.h, own.j0, seq.rows_k, dim), seq.len_k - own.j0, warp, lane);
  }
}

template <bool is_split> struct KeySums {
  using Own = Share<tile_kv, head_dim_tile, n_warps / 2>;
  Own own;   // of the upper warps dK, of the lower dV

  DEVICE static bool makes_dK(int warp) { return warp >= n_warps / 2; }
  DEVICE static int place(int warp) { return warp % (n_warps / 2); }
  DEVICE void clear() { own.clear(); }
  // dV += P^T dO,  dK += dS^T Q
  template <class Scores, class Q, class V>
  DEVICE void add(Scores& P, Scores& dS, Q& queries, V (&dO)[dO_parts], int warp, int lane) {
    const bool is_dK = makes_dK(warp);
    multiply(own, is_dK ? dS : P, is_dK ? queries : dO[0], place(warp), lane);
    if constexpr (dO_parts > 1)
      for (int part = 1; part < dO_parts && !is_dK; ++part) multiply(own, P, dO[part], place(warp), lane);
  }
  template <class... Given> DEVICE void add_own(Given&...) {}   // never: see keeps_P
  DEVICE void store(const Args& args, const KeyTile& keys, bool is_shared, int warp, int lane) {
    store_keys(own, makes_dK(warp), args, keys, is_shared, place(warp), lane);
  }
};
template <> struct KeySums<false> {
  OfK dK;
  OfV dV;

  DEVICE void clear() {
    dK.clear();
    dV.clear();
  }
  template <class Scores, class Q, class V>
  DEVICE void add(Scores& P, Scores& dS, Q& queries, V (&dO)[dO_parts], int warp, int lane) {
    for (auto& part : dO) multiply(dV, P, part, warp, lane);
    multiply(dK, dS, queries, warp, lane);
  }
  // Where the warp itself has made its rows of P^T and dS^T, for queries from `first` on.
  template <class Part, class Q, class V>
  DEVICE void add_own(const Part& P, const Part& dS, Q& queries, V (&dO)[dO_parts], int first, int warp,
                      int lane) {
    for (auto& part : dO) multiply_own(dV, P, part, first, warp, lane);
    multiply_own(dK, dS, queries, first, warp, lane);
  }
  DEVICE void store(const Args& args, const KeyTile& keys, bool is_shared, int warp, int lane) {
    store_keys(dK, true, args, keys, is_shared, warp, lane);
    store_keys(dV, false, args, keys, is_shared, warp, lane);
  }
};
