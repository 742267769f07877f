// shares.cuh - products on tensor cores that all warps of a block share, as the backward needs them.
//
// Scores come transposed, S^T[j][i]: rows are keys.  A warp multiplies 16 rows of A by 8 columns of B:
//
//   product            A            B            in shared memory   read by
//   S^T  += K Q^T      K[j][d]      Q[i][d]      as they lie        ldmatrix, ldmatrix         multiply_rows
//   dP^T += V dO^T     V[j][d]      dO[i][d]     as they lie        ldmatrix, ldmatrix         multiply_rows
//   dV   += P^T dO     P^T[j][i]    dO[i][d]     k is B's row       ldmatrix, ldmatrix.trans   multiply
//   dK   += dS^T Q     dS^T[j][i]   Q[i][d]      k is B's row       ldmatrix, ldmatrix.trans   multiply
//   dQ   += dS K       dS^T[j][i]   K[j][d]      k is both's row    ldmatrix.trans, both   multiply_columns
#pragma once
#include "barrier.cuh"
#include "matrices.cuh"

// Into how many columns of warps a product of [rows, cols] is cut, so that the warps read least; 16 rows and
// 16 columns at least, or the 8 columns that are left.
DEVICE constexpr int warps_across(int rows, int cols, int warps) {
  int best = 1, least = 1 << 20;
  for (int across = 1; across <= warps; across *= 2) {
    const int down = warps / across, read = rows / down + cols / across;
    const bool is_cut = rows % (16 * down) == 0 && (cols % (16 * across) == 0 || cols == 8 * across);
    if (is_cut && read < least) best = across, least = read;
  }
  return best;
}

// What a warp holds of a product of [n_rows, n_cols] that all warps of the block, or some, share.  Rows lie
// in one piece; columns alternate between the warps, 16 at a time, so that every warp reads at constant
// distances.
// Piece (a, c) is 16 x 8; of it a lane has rows lane / 4 and + 8, columns 2 (lane % 4) and + 1.
template <int n_rows_, int n_cols, int warps = n_warps, int cut = warps_across(n_rows_, n_cols, warps)>
struct Share {
  static constexpr int across = cut, down = warps / across;
  static constexpr int row_blocks = n_rows_ / down / 16, n = n_cols / across / 8, n_rows = 2 * row_blocks;
  static constexpr int group = n == 1 ? 8 : 16;   // neighbouring columns of one warp
  static_assert(row_blocks * 16 * down == n_rows_ && n * 8 * across == n_cols, "Share: an uneven cut");
  float at[row_blocks][n][4];

  DEVICE void clear() {
#pragma unroll
    for (int a = 0; a < row_blocks; ++a)
#pragma unroll
      for (int c = 0; c < n; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[a][c][e] = 0;
  }
  DEVICE static int first_row(int warp) { return warp / across * row_blocks * 16; }
  DEVICE static int first_col(int warp) { return warp % across * group; }
  // Row r of a lane (piece r / 2, upper or lower half r % 2); the first of its two columns in piece c.
  DEVICE static int row(int warp, int lane, int r) {
    return first_row(warp) + r / 2 * 16 + r % 2 * 8 + lane / 4;
  }
  DEVICE static int col(int warp, int lane, int c) {
    return first_col(warp) + c * 8 / group * group * across + c * 8 % group + lane % 4 * 2;
  }
  DEVICE float& of_row(int r, int c, int e) { return at[r / 2][c][r % 2 * 2 + e]; }
};

// ---- products.  A step is 16 of k.

// The two neighbouring pieces of a share, or its only one, times one step of A.
template <class Result>
DEVICE void multiply_step(Result& result, int pair, const u32 (&A)[Result::row_blocks][4],
                          const u32 (&B)[4]) {
#pragma unroll
  for (int a = 0; a < Result::row_blocks; ++a) {
    mma_k16<elem>(result.at[a][2 * pair], A[a], B[0], B[1]);
    if constexpr (Result::n > 1) mma_k16<elem>(result.at[a][2 * pair + 1], A[a], B[2], B[3]);
  }
}
template <class Result> constexpr int n_pairs = (Result::n + 1) / 2;

template <bool trans, int n> DEVICE void load_B(u32 (&B)[4], u32 address) {
  if constexpr (n == 1) {
    u32 half[2];
    if constexpr (trans) ldmatrix_x2_trans(half, address);
    else ldmatrix_x2(half, address);
    B[0] = half[0], B[1] = half[1];
  } else if constexpr (trans) ldmatrix_x4_trans(B, address);
  else ldmatrix_x4(B, address);
}

// result[j][i] += sum over d of A[j][d] B[b_row0 + i][d]               S^T = K Q^T,  dP^T = V dO^T
template <class Result, class TileA, class TileB>
DEVICE void multiply_rows(Result& result, TileA& A, TileB& B, int b_row0, int warp, int lane) {
  const u32 a0 = address_of_A(A, Result::first_row(warp), lane);
  const int b_lane = Result::n == 1 ? lane % 16 : lane;   // ldmatrix_x2 reads 8 rows
  const u32 b0 = address_of_B(B, b_row0 + Result::first_col(warp), b_lane);
#pragma unroll
  for (int k = 0; k < TileA::cols / 16; ++k) {
    u32 a[Result::row_blocks][4];
#pragma unroll
    for (int block = 0; block < Result::row_blocks; ++block)
      ldmatrix_x4(a[block], A.along(a0, 2 * k) + block * 16 * TileA::cols * 2);
#pragma unroll
    for (int pair = 0; pair < n_pairs<Result>; ++pair) {
      u32 b[4];
      load_B<false, Result::n>(b, B.along(b0, 2 * k) + pair * 16 * Result::across * TileB::cols * 2);
      multiply_step(result, pair, a, b);
    }
  }
}

// One step of B[k][d], times A: the columns of B that are the share's.
template <class Result, class TileB>
DEVICE void multiply_columns_of(Result& result, const u32 (&a)[Result::row_blocks][4], TileB& B, u32 b0,
                                int k) {
#pragma unroll
  for (int pair = 0; pair < n_pairs<Result>; ++pair) {
    u32 b[4];
    load_B<true, Result::n>(b, B.along(b0, 2 * Result::across * pair) + k * 16 * TileB::cols * 2);
    multiply_step(result, pair, a, b);
  }
}
// Where the share's columns of B begin, of a result whose column 0 is B's d0.
template <class Result, class TileB> DEVICE u32 columns_of(TileB& B, int row0, int d0, int warp, int lane) {
  return B.address(row0 + lane % 16, (d0 + Result::first_col(warp)) / 8 + lane / 16 % (Result::group / 8));
}

// result[j][d] += sum over i of A[j][i] B[i][d]                        dV = P^T dO,  dK = dS^T Q
template <class Result, class TileA, class TileB>
DEVICE void multiply(Result& result, TileA& A, TileB& B, int warp, int lane) {
  const u32 a0 = address_of_A(A, Result::first_row(warp), lane);
  const u32 b0 = columns_of<Result>(B, 0, 0, warp, lane);
#pragma unroll
  for (int k = 0; k < TileA::cols / 16; ++k) {
    u32 a[Result::row_blocks][4];
#pragma unroll
    for (int block = 0; block < Result::row_blocks; ++block)
      ldmatrix_x4(a[block], A.along(a0, 2 * k) + block * 16 * TileA::cols * 2);
    multiply_columns_of(result, a, B, b0, k);
  }
}

// The same where the warp itself has made its rows of A: they are in its registers.  B begins at row b_row0.
template <class Result, class PartA, class TileB>
DEVICE void multiply_own(Result& result, const PartA& A, TileB& B, int b_row0, int warp, int lane) {
  static_assert(PartA::across == 1 && Result::across == 1, "multiply_own: a warp has whole rows");
  const u32 b0 = columns_of<Result>(B, b_row0, 0, warp, lane);
#pragma unroll
  for (int k = 0; k < PartA::n / 2; ++k) {
    u32 a[Result::row_blocks][4];
#pragma unroll
    for (int block = 0; block < Result::row_blocks; ++block)
      repack(a[block], A.at[block][2 * k], A.at[block][2 * k + 1]);
    multiply_columns_of(result, a, B, b0, k);
  }
}

// result[i][d] += sum over j of A[j][i] B[j][d0 + d]                   dQ = dS K
template <class Result, class TileA, class TileB>
DEVICE void multiply_columns(Result& result, TileA& A, TileB& B, int d0, int warp, int lane) {
  const u32 a0 = A.address(lane % 8 + lane / 16 * 8, Result::first_row(warp) / 8 + lane / 8 % 2);
  const u32 b0 = columns_of<Result>(B, 0, d0, warp, lane);
#pragma unroll
  for (int k = 0; k < TileA::rows / 16; ++k) {
    u32 a[Result::row_blocks][4];
#pragma unroll
    for (int block = 0; block < Result::row_blocks; ++block)
      ldmatrix_x4_trans(a[block], A.along(a0, 2 * block) + k * 16 * TileA::cols * 2);
    multiply_columns_of(result, a, B, b0, k);
  }
}

// Where the shares of S^T and dP^T would be small, half of the warps makes S^T and the other half dP^T, in
// shares twice as wide, and pairs of warps trade: of 32 columns each keeps 16 and gets the other's same 16
// (of 16 columns, where there are no more, 8).
template <class Half> struct Trade {
  static constexpr int n_given = Half::row_blocks * Half::n / 2;
  static constexpr int turn = Half::n == 2 ? 1 : 2;   // neighbouring pieces that stay together
  static_assert(Half::n % 4 == 0 || Half::n == 2, "Trade: columns that have two halves");
  // Piece c of those that stay with the product's own warp; the one `turn` further goes to its partner.
  DEVICE static constexpr int own_piece(int c) { return c / turn * 2 * turn + c % turn; }
  Shared<float, n_warps * n_given, 128> pieces;

  // The share of a warp after the trade, among all.
  DEVICE static int place(int warp) {
    const int half_warp = warp % (n_warps / 2), is_second = warp / (n_warps / 2);
    if constexpr (Half::n == 2) return half_warp * 2 + is_second;   // the halves lie side by side
    return (half_warp / Half::across * 2 + is_second) * Half::across + half_warp % Half::across;
  }
  // S, dP <- the columns that stay here, of the warp's own product and of its partner's.
  template <class Part> DEVICE void operator()(Half& mine, Part& S, Part& dP, int warp, int lane) {
    static_assert(2 * Part::n == Half::n, "Trade: half of the columns");
    const bool makes_dP = warp >= n_warps / 2;
    const int from = (warp + n_warps / 2) % n_warps;
#pragma unroll
    for (int a = 0; a < Part::row_blocks; ++a)
#pragma unroll
      for (int c = 0; c < Part::n; ++c) {
        const int first = own_piece(c), second = first + turn;
        Vec16<float> piece;
#pragma unroll
        for (int e = 0; e < 4; ++e) piece.item[e] = makes_dP ? mine.at[a][first][e] : mine.at[a][second][e];
        pieces.template as<Vec16<float>>(warp * n_given + a * Part::n + c, lane * 4) = piece;
      }
    barrier_sync(1 + warp % (n_warps / 2), 64);   // both of the pair have given
#pragma unroll
    for (int a = 0; a < Part::row_blocks; ++a)
#pragma unroll
      for (int c = 0; c < Part::n; ++c) {
        const int first = own_piece(c), second = first + turn;
        const Vec16<float> piece =
            pieces.template as<Vec16<float>>(from * n_given + a * Part::n + c, lane * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          S.at[a][c][e] = makes_dP ? piece.item[e] : mine.at[a][first][e];
          dP.at[a][c][e] = makes_dP ? mine.at[a][second][e] : piece.item[e];
        }
      }
  }
};

// ---- results

// tile[j][first + i] = part, in 16 bits.  The caller synchronises.
// A lane's rows have one key, and chunks of its pieces differ from its first in other bits than those of the
// warp: an address is one xor with a constant.
template <class Part, int rows, int cols>
DEVICE void store_scores(Part& part, XorTile<rows, cols>& tile, int first, int warp, int lane) {
  const int row0 = Part::row(warp, lane, 0), col0 = first + Part::col(warp, lane, 0);
  const int chunk0 = col0 / 8 ^ tile.key(row0);
#pragma unroll
  for (int c = 0; c < Part::n; ++c)
#pragma unroll
    for (int r = 0; r < Part::n_rows; ++r)
      tile.cells.template as<u32>(row0 + Part::row(0, 0, r),
                                  (chunk0 ^ Part::col(0, 0, c) / 8) * 8 + col0 % 8) =
          pack<elem>(part.of_row(r, c, 0), part.of_row(r, c, 1));
}

// target += part, atomically.  Lanes 2n and 2n + 1 exchange halves of two neighbouring pieces: each has 4
// neighbouring columns of one of them then, 16 bytes.
template <class Part>
DEVICE void add_share(Part& part, void* data, const TileSource& target, int warp, int lane) {
  const Global<float> to(data);
  if (Part::n > 1 && target.by_vectors) {
    const bool odd = lane % 2;
    const int col0 = Part::col(warp, lane, 0) + (odd ? 6 : 0);   // odd: of the second piece
#pragma unroll
    for (int r = 0; r < Part::n_rows; ++r) {
      const int row = Part::row(warp, lane, r);
      const i64 index = target.base + row * target.stride + col0;
#pragma unroll
      for (int c = 0; c + 1 < Part::n; c += 2) {
        Vec16<float> sum;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float first = part.of_row(r, c, e), second = part.of_row(r, c + 1, e);
          const float got = shfl_xor(odd ? first : second, 1);
          sum.item[e] = odd ? got : first;
          sum.item[2 + e] = odd ? second : got;
        }
        const int d = Part::col(0, 0, c);
        if (row < target.rows && col0 + d < target.cols) add_chunk(to, index + d, sum);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const int row = Part::row(warp, lane, r);
    const i64 index = target.base + row * target.stride;
#pragma unroll
    for (int c = 0; c < Part::n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = Part::col(warp, lane, c) + e;
        if (row < target.rows && d < target.cols) to.add(index + d, part.of_row(r, c, e));
      }
  }
}

// Sums in memory as the warps hold a share: 16 bytes of every thread side by side, piece after piece, so that
// a warp touches whole lines.  first: index of the share's first number.
template <class Part> DEVICE i64 piece_index(i64 first, int a, int c, int thread) {
  return first + ((a * Part::n + c) * n_threads + thread) * 4;
}
template <class Part>
DEVICE void add_pieces(const Part& part, const Global<float>& to, i64 first, int thread) {
#pragma unroll
  for (int a = 0; a < Part::row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < Part::n; ++c) {
      const float(&x)[4] = part.at[a][c];
      add_chunk(to, piece_index<Part>(first, a, c, thread), Vec16<float>{{x[0], x[1], x[2], x[3]}});
    }
}
template <class Part>
DEVICE void load_pieces(Part& part, const Global<float>& from, i64 first, int thread) {
#pragma unroll
  for (int a = 0; a < Part::row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < Part::n; ++c) {
      const Vec16<float> x = from.template load_as<Vec16<float>>(piece_index<Part>(first, a, c, thread));
#pragma unroll
      for (int e = 0; e < 4; ++e) part.at[a][c][e] = x.item[e];
    }
}

// target = part * scale; rows from `existing` on are 0 whatever the part holds.
template <class To, class Part>
DEVICE void store_share(Part& part, float scale, void* data, const TileSource& target, i32 existing, int warp,
                        int lane) {
  const Global<To> to(data);
  if constexpr (sizeof(To) == 2 && Part::n % 4 == 2) {
    if (target.by_vectors) {   // 2 pieces of 2 rows: a lane gets the 8 columns of one and stores 16 bytes
#pragma unroll
      for (int r = 0; r < Part::n_rows; r += 2) {
        const int row = Part::row(warp, lane, r + lane % 4 / 2);
        const i64 index = target.base + row * target.stride;
#pragma unroll
        for (int c = 0; c < Part::n; c += 2) {
          u32 chunk[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int of = r + n / 2, piece = c + n % 2;
            const bool exists = Part::row(warp, lane, of) < existing;
            chunk[n] = pack<To>(exists ? part.of_row(of, piece, 0) * scale : 0.f,
                                exists ? part.of_row(of, piece, 1) * scale : 0.f);
          }
          transpose_quad(chunk, lane);
          const int d = Part::col(warp, 0, c) + lane % 2 * 8;
          if (row < target.rows && d < target.cols)
            to.store_as(index + d, Pack<u32, 4>{{chunk[0], chunk[1], chunk[2], chunk[3]}});
        }
      }
      return;
    }
  }
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const int row = Part::row(warp, lane, r);
    const i64 index = target.base + row * target.stride;
    const auto number = [&](int c, int e) {
      return row < existing ? part.of_row(r, c, e) * scale : 0.f;   // 0 even where the part is NaN
    };
    if constexpr (sizeof(To) == 2 && Part::n % 4 == 0) {
      if (target.by_vectors) {   // 4 pieces: a lane gets the 8 columns of one and stores 16 bytes
#pragma unroll
        for (int c = 0; c < Part::n; c += 4) {
          u32 chunk[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) chunk[n] = pack<To>(number(c + n, 0), number(c + n, 1));
          transpose_quad(chunk, lane);
          const int first = Part::col(warp, 0, c), second = Part::col(warp, 0, c + 2);
          const int d = (lane % 4 / 2 ? second : first) + lane % 2 * 8;
          if (row < target.rows && d < target.cols)
            to.store_as(index + d, Pack<u32, 4>{{chunk[0], chunk[1], chunk[2], chunk[3]}});
        }
        continue;
      }
    }
    if (row >= target.rows) continue;
#pragma unroll
    for (int c = 0; c < Part::n; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int d = Part::col(warp, lane, c) + e;
        if (d < target.cols) to.store(index + d, convert<To>(number(c, e)));
      }
  }
}
