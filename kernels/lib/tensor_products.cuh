// tensor_products.cuh - the two products of a warp on tensor cores: S = Q K^T and O += P V, from tiles in
// shared memory.
//
// 16-bit numbers go into mma as they are.  Of floats mma takes the first 11 bits (TF32):
//   precision_code 1   numbers are rounded to TF32 as they arrive: one product
//   precision_code 2   x = high + low, both TF32: high high + low high + high low leaves 2^-21 of x
//   precision_code 3   so, and with care for infinities, of which the parts would be infinity and NaN
// Tensor cores cut their sums after each step and do not round them, so that a long sum drifts towards zero:
// of three products sums of CHAIN steps are added up by ordinary additions, and the small products apart.
//
// Which columns of O a lane holds: of floats, the B of P V comes from whole chunks of V, so that piece c of O
// is every fourth column of 32 (O_col), and k of P V counts keys in the order in which S's registers hold
// them.
#pragma once
#include "fragments.cuh"
#include "parts.cuh"

constexpr bool is_16_bit = sizeof(elem) == 2;
constexpr bool is_one_tf32 = !is_16_bit && precision_code == 1;
constexpr bool is_three_tf32 = !is_16_bit && !is_one_tf32;
constexpr bool is_careful = is_three_tf32 && precision_code == 3;
constexpr int step_depth = is_16_bit ? 16 : 8;   // of one mma: two chunks
constexpr int CHAIN = 8;

using QTile = XorTile<tile_q, head_dim_tile>;
using KTile = XorTile<span, head_dim_tile>;
using VTile = XorTile<span, head_dim_v_tile>;
static_assert(is_16_bit || head_dim_v_tile % 32 == 0, "tensor_products: columns of V in groups of 32");

DEVICE void multiply_step(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (is_16_bit) mma_k16<elem>(d, a, b0, b1);
  else mma_tf32_k8(d, a, b0, b1);
}

// ---- floats as TF32

constexpr u32 TF32_BITS = 0xffffe000u, TF32_HALF = 0x1000u;   // mma ignores the other bits

// x = high + low.  partner: what the other operand's low is multiplied by, high itself.
// keeps_infinity: of an infinite x only high is infinite.  Else x becomes NaN.
template <int n, bool keeps_infinity = is_careful> struct Parts {
  u32 high[n], low[n], partner[n];
  DEVICE explicit Parts(const u32 (&x)[n]) {
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float value = __builtin_bit_cast(float, x[e]);
      high[e] = (keeps_infinity ? x[e] : x[e] + TF32_HALF) & TF32_BITS;
      low[e] = __builtin_bit_cast(u32, value - __builtin_bit_cast(float, high[e]));
      partner[e] = high[e];
      if constexpr (keeps_infinity)
        if (!(value - value == 0)) low[e] = partner[e] = 0, high[e] = value == value ? x[e] : 0x7fc00000u;
    }
  }
};

// d_high += the large product, d_low += the small ones.
template <bool a, int n>
DEVICE void multiply_parts(float (&d_high)[4], float (&d_low)[4], const Parts<4, a>& A, const Parts<n>& B,
                           int b0, int b1) {
  multiply_step(d_low, A.low, B.partner[b0], B.partner[b1]);
  multiply_step(d_low, A.partner, B.low[b0], B.low[b1]);
  multiply_step(d_high, A.high, B.high[b0], B.high[b1]);
}

// This thread's chunks of a tile it has asked for are rounded to TF32, in place.  They are there.
template <class Tile> DEVICE void round_own_chunks(Tile& tile, const Tensor& tensor, int thread) {
  constexpr int chunks = Tile::cols / per_chunk, across = Tile::period, step = n_threads / across;
  const auto round = [&](int row, int at) {
    Vec16<elem>& chunk = tile.chunk(row, at);
    Vec16<elem> x = chunk;
#pragma unroll
    for (int e = 0; e < per_chunk; ++e)
      x.item[e] = convert<elem>(before_tf32(convert<float>(x.item[e])));
    chunk = x;
  };
  if (tensor.vector_bytes == 16) {
    const int row0 = thread / across, chunk0 = thread % across;
#pragma unroll
    for (int down = 0; down < Tile::rows; down += step)
#pragma unroll
      for (int c = 0; c < chunks; c += across)
        if (Tile::rows % step == 0 || row0 + down < Tile::rows) round(row0 + down, chunk0 + c);
  } else {
#pragma unroll 1
    for (int at = thread; at < Tile::rows * chunks; at += n_threads) round(at / chunks, at % chunks);
  }
}

// to += from, whose first piece is piece `first` of to.
template <int n, int m> DEVICE void add_pieces(Fragment<n>& to, int first, const Fragment<m>& from) {
#pragma unroll
  for (int a = 0; a < row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < Fragment<m>::n; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) to.at[a][first + c][e] += from.at[a][c][e];
}

// ---- S = Q K^T

// The first steps of Q, read once and kept in registers.
struct KeptQ {
  u32 at[kept_steps > 0 ? kept_steps : 1][row_blocks][4];
  DEVICE void load(u32 Q_at) {
#pragma unroll
    for (int k = 0; k < kept_steps; ++k)
#pragma unroll
      for (int a = 0; a < row_blocks; ++a)
        ldmatrix_x4(at[k][a], QTile::along(Q_at, 2 * k) + QTile::down(16 * a));
  }
};

// The lane's addresses of A and B, as address_of_A and address_of_B give them.
DEVICE void multiply_QK(Fragment<tile_kv>& S, const KeptQ& kept, u32 Q_at, u32 K_at) {
  constexpr int n_steps = head_dim_tile / step_depth;
  constexpr int n_chains = is_three_tf32 ? (n_steps + CHAIN - 1) / CHAIN : 1, chain = n_steps / n_chains;
  static_assert(chain * n_chains == n_steps, "multiply_QK: chains");
  S.clear();
#pragma unroll
  for (int k0 = 0; k0 < n_steps; k0 += chain) {
    Fragment<tile_kv> high, low;
    if constexpr (is_three_tf32) high.clear(), low.clear();
#pragma unroll
    for (int k = k0; k < k0 + chain; ++k) {
      u32 Q[row_blocks][4];
#pragma unroll
      for (int a = 0; a < row_blocks; ++a) {
        if (k < kept_steps)
          for (int e = 0; e < 4; ++e) Q[a][e] = kept.at[k < kept_steps ? k : 0][a][e];
        else
          ldmatrix_x4(Q[a], QTile::along(Q_at, 2 * k) + QTile::down(16 * a));
      }
#pragma unroll
      for (int c = 0; c < tile_kv / 16; ++c) {
        u32 K[4];
        ldmatrix_x4(K, KTile::along(K_at, 2 * k) + KTile::down(16 * c));
        if constexpr (is_three_tf32) {
          const Parts<4> B(K);
#pragma unroll
          for (int a = 0; a < row_blocks; ++a) {
            const Parts<4> A(Q[a]);
            multiply_parts(high.at[a][2 * c], low.at[a][2 * c], A, B, 0, 1);
            multiply_parts(high.at[a][2 * c + 1], low.at[a][2 * c + 1], A, B, 2, 3);
          }
        } else {
#pragma unroll
          for (int a = 0; a < row_blocks; ++a) {
            multiply_step(S.at[a][2 * c], Q[a], K[0], K[1]);
            multiply_step(S.at[a][2 * c + 1], Q[a], K[2], K[3]);
          }
        }
      }
    }
    if constexpr (is_three_tf32) add_pieces(S, 0, high), add_pieces(S, 0, low);
  }
}

// ---- O += P V

// P as the A operand of P V, from the registers of S.
struct Weights {
  static constexpr int n_steps = tile_kv / step_depth;
  u32 at[n_steps][row_blocks][4];   // of floats: their bits

  DEVICE void take(const Fragment<tile_kv>& S) {
#pragma unroll
    for (int k = 0; k < n_steps; ++k)
#pragma unroll
      for (int a = 0; a < row_blocks; ++a) {
        if constexpr (is_16_bit) {
          repack(at[k][a], S.at[a][2 * k], S.at[a][2 * k + 1]);
        } else {   // k of mma: 0..3 are keys 0, 2, 4, 6 and 4..7 are 1, 3, 5, 7
          const int order[4] = {0, 2, 1, 3};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            at[k][a][e] = __builtin_bit_cast(u32, is_one_tf32 ? before_tf32(S.at[a][k][order[e]])
                                                              : S.at[a][k][order[e]]);
        }
      }
  }
};

// The first column of the lane's element e of piece c of O.
DEVICE int O_col(int lane, int c, int e) {
  if constexpr (is_16_bit) return fragment_col(lane, c) + e;
  return c / 4 * 32 + lane % 4 * 8 + 4 * e + c % 4;
}

// Where the lane's part of V begins, for multiply_PV.
DEVICE u32 address_of_V(VTile& V, int lane) { return address_of_B_trans(V, 0, lane); }

DEVICE void multiply_PV_steps(Fragment<head_dim_v_tile>& O, const Weights& P, u32 V_at) {
#pragma unroll
  for (int k = 0; k < Weights::n_steps; ++k)
#pragma unroll
    for (int c = 0; c < head_dim_v_tile / 16; ++c) {
      u32 V[4];
      ldmatrix_x4_trans(V, VTile::along(V_at, 2 * c) + VTile::down(16 * k));
#pragma unroll
      for (int a = 0; a < row_blocks; ++a) {
        multiply_step(O.at[a][2 * c], P.at[k][a], V[0], V[1]);
        multiply_step(O.at[a][2 * c + 1], P.at[k][a], V[2], V[3]);
      }
    }
}

// Of floats.
DEVICE void multiply_PV_columns(Fragment<head_dim_v_tile>& O, const Weights& P, VTile& tile, int row0,
                                int lane) {
  const int g = lane / 4, even = lane % 4 * 2;   // rows even and even + 1 of 8, chunk g of 8
  constexpr bool is_apart = head_dim_v_tile <= 128;   // small products: above, O leaves too few registers
#pragma unroll
  for (int group = 0; group < head_dim_v_tile / 32; ++group) {
    Fragment<32> high, low;
    high.clear();
    low.clear();
#pragma unroll
    for (int k = 0; k < Weights::n_steps; ++k) {
      u32 V[8];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int at = 8 * group + (g ^ VTile::key(even + b));
        const auto chunk = tile.cells.template as<Vec16<elem>>(row0 + 8 * k + even + b, at * per_chunk);
#pragma unroll
        for (int e = 0; e < 4; ++e) V[2 * e + b] = __builtin_bit_cast(u32, convert<float>(chunk.item[e]));
      }
      if constexpr (is_three_tf32) {
        const Parts<8> B(V);
#pragma unroll
        for (int a = 0; a < row_blocks; ++a) {
          const Parts<4, false> A(P.at[k][a]);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            multiply_parts(high.at[a][e], (is_apart ? low : high).at[a][e], A, B, 2 * e, 2 * e + 1);
        }
      } else {
#pragma unroll
        for (int a = 0; a < row_blocks; ++a)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            multiply_step(O.at[a][4 * group + e], P.at[k][a], V[2 * e], V[2 * e + 1]);
      }
    }
    if constexpr (is_three_tf32) add_pieces(O, 4 * group, high);
    if constexpr (is_three_tf32 && is_apart) add_pieces(O, 4 * group, low);
  }
}

// O += P V.  V_at: address_of_V of the tile.
DEVICE void multiply_PV(Fragment<head_dim_v_tile>& O, const Weights& P, VTile& V, int row0, u32 V_at,
                        int lane) {
  if constexpr (is_16_bit) multiply_PV_steps(O, P, V_at + VTile::down(row0));
  else multiply_PV_columns(O, P, V, row0, lane);
}

// ---- O to global memory

// target = O, rows of the block's tile.  row0: the warp's first.
template <class To>
DEVICE void store_O(Fragment<head_dim_v_tile>& O, void* data, const TileSource& target, int row0, int lane) {
  if constexpr (is_16_bit) return store_fragment<To>(O, data, target, row0, lane);
  constexpr int run = sizeof(To) == 8 ? 2 : 4;   // neighbouring columns of a lane that one store takes
  const Global<To> to(data);
#pragma unroll
  for (int r = 0; r < n_rows; ++r) {
    const int row = row0 + fragment_row(0, lane, r);
    const i64 index = target.base + row * target.stride;
    if (row >= target.rows) continue;
#pragma unroll
    for (int c = 0; c < O.n; c += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int from = 0; from < 4; from += run) {
          const int d = O_col(lane, c + from, e);
          Pack<To, run> out;
#pragma unroll
          for (int n = 0; n < run; ++n) out.item[n] = convert<To>(O.of_row(r, c + from + n, e));
          if (target.by_vectors && d < target.cols) {
            to.store_as(index + d, out);
          } else {
#pragma unroll
            for (int n = 0; n < run; ++n)
              if (d + n < target.cols) to.store(index + d + n, out.item[n]);
          }
        }
  }
}

// Are all the numbers of this lane?
DEVICE bool is_finite(const Fragment<head_dim_v_tile>& O, const RowState& state) {
  float zero = 0;   // or NaN
#pragma unroll
  for (int r = 0; r < n_rows; ++r) zero += state.l[r] - state.l[r];
#pragma unroll
  for (int a = 0; a < row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < O.n; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) zero += O.at[a][c][e] - O.at[a][c][e];
  return zero == 0;
}
