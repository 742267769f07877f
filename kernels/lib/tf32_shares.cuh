// tf32_shares.cuh - shares.cuh for float32: one TF32 product each, or three that keep float32's bits.
//
// x = high + low, both TF32 (11 bits); a b = low high + high low + high high leaves an error of 2^-22.
// Tensor cores round sums toward zero: long sums are made in chains, which ordinary additions put together.
//
// mma_tf32_k8 takes k in steps of 8.  Where k runs along the rows of memory ldmatrix reads operands (a row of
// 16 bytes is 4 numbers); where it runs down the columns, lanes read number by number, 4 rows x 8 columns.
#pragma once
#include "mma_gradient.cuh"

// precision_code: 1 one product; 2 three, of finite numbers; 3 three, of any
constexpr bool is_three_products = precision_code >= 2, takes_infinity = precision_code == 3;

// Chunk c (4 numbers) of a row lies at c xor key(row).  Keys of 8 rows are distinct, so ldmatrix reads one
// chunk of 8 rows without conflicts; keys of 4 neighbouring rows differ above their lowest bit, so 8 columns
// of 4 rows are read without conflicts too.
template <int n_rows_, int n_cols> struct FloatTile {
  static constexpr int rows = n_rows_, cols = n_cols, chunks = cols / 4, period = chunks % 8 == 0 ? 8 : 4;
  Shared<float, rows, cols> cells;
  DEVICE static int key(int row) {
    if constexpr (period == 4) return row / 2 & 3;
    return ((row & 3) ^ (row >> 2 & 1)) << 1 | (row >> 2 & 1);
  }
  DEVICE float& number(int row, int col) { return cells(row, (col / 4 ^ key(row)) * 4 + col % 4); }
  DEVICE Vec16<float>& chunk(int row, int at) {
    return cells.template as<Vec16<float>>(row, (at ^ key(row)) * 4);
  }
  DEVICE u32 address(int row, int at) { return cells.address(row, (at ^ key(row)) * 4); }
  // address(row, at + first) from address(row, first), `at` a multiple of 2, first 0 or 1.
  DEVICE static u32 along(u32 address, int at) {
    return (address ^ at % period * 16) + at / period * period * 16;
  }
};

template <bool is_float, int rows, int cols> struct TileChoice { using type = XorTile<rows, cols>; };
template <int rows, int cols> struct TileChoice<true, rows, cols> { using type = FloatTile<rows, cols>; };
// A tile of the inputs' dtype.
template <int rows, int cols> using ElemTile = typename TileChoice<is_same<elem, float>, rows, cols>::type;

// tile[r][d] = source by cp.async where chunks can be read whole, else by numbers.  The caller commits.
template <int rows, int cols>
DEVICE void request_tile(FloatTile<rows, cols>& tile, const void* data, const TileSource& source,
                         int thread) {
  const Global<float> from(const_cast<void*>(data));
  constexpr int chunks = cols / 4, n = rows * chunks;
  const int first = opaque(thread);
#pragma unroll 2
  for (int at = first; at < n; at += n_threads) {
    const int row = at / chunks, d = at % chunks * 4;
    const i64 index = source.base + row * source.stride + d;
    if (source.by_vectors) {
      const u32 n_bytes = row < source.rows && d < source.cols ? 16 : 0;
      cp_async(tile.address(row, at % chunks), from.address(index, n_bytes), n_bytes);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        tile.number(row, d + e) = row < source.rows && d + e < source.cols ? from.load(index + e) : 0.f;
    }
  }
}

// ---- operands in two parts

constexpr u32 TF32_BITS = 0xffffe000u, TF32_HALF = 0x1000u;   // mma ignores the other bits

DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }

// x = high + low.  One product: high alone, rounded.  partner: what the other operand's low is multiplied by,
// high itself; where x is not finite low and partner are 0, else infinity would meet a low of 0.
template <int n> struct Parts {
  u32 high[n], low[n], partner[n];
  DEVICE explicit Parts(const u32 (&x)[n]) {
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float value = __builtin_bit_cast(float, x[e]);
      if constexpr (is_three_products) {
        high[e] = (x[e] + TF32_HALF) & TF32_BITS;
        low[e] = bits_of(value - __builtin_bit_cast(float, high[e]));
        partner[e] = high[e];
        if constexpr (takes_infinity)
          if (!(value - value == 0)) low[e] = partner[e] = 0, high[e] = x[e];
      } else {
        high[e] = bits_of(before_tf32(value));
      }
    }
  }
};

// A sum under way, of n pieces of a share, `first` and those behind it.  One product: the share itself.  Of
// three the small ones are summed apart, and the large ones in chains.
template <class Result, int n = Result::n, bool in_parts = is_three_products> struct Chain {
  Result& result;
  const int first;
  DEVICE Chain(Result& result, int first) : result(result), first(first) {}
  DEVICE float (&large(int a, int c))[4] { return result.at[a][first + c]; }
  DEVICE void flush(bool) {}
};
template <class Result, int n> struct Chain<Result, n, true> {
  Result& result;
  const int first;
  float larges[Result::row_blocks][n][4], small[Result::row_blocks][n][4];
  DEVICE Chain(Result& result, int first) : result(result), first(first) {
#pragma unroll
    for (int a = 0; a < Result::row_blocks; ++a)
#pragma unroll
      for (int c = 0; c < n; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) larges[a][c][e] = small[a][c][e] = 0;
  }
  DEVICE float (&large(int a, int c))[4] { return larges[a][c]; }
  // result += what has been summed; last: the small products too.
  DEVICE void flush(bool is_last) {
#pragma unroll
    for (int a = 0; a < Result::row_blocks; ++a)
#pragma unroll
      for (int c = 0; c < n; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (is_last) larges[a][c][e] += small[a][c][e];
          result.at[a][first + c][e] += larges[a][c][e];
          larges[a][c][e] = 0;
        }
  }
};
constexpr int chain_steps = 4;   // of 8
// Steps whose operands are under way at once: as many as there are registers for.
constexpr bool is_tight = is_three_products && kept_floats > 64;   // dK and dV have taken them
constexpr int MANY_STEPS = takes_infinity || is_tight ? 2 : is_three_products ? 8 : 4;
constexpr int FEW_STEPS = is_tight ? 1 : is_three_products ? 2 : 4;
// Pieces of dK and dV at once: chains want as many registers again, twice.
template <class Result>
constexpr int n_at_once = !is_tight            ? Result::n
                          : Result::n % 4 == 0 ? Result::n / 4
                          : Result::n % 2 == 0 ? Result::n / 2
                                               : Result::n;

// Pieces of a chain, n of them from `first` on, times a step of 8: B has two numbers for each piece.
template <int n, class Result, int in_chain>
DEVICE void multiply_parts(Chain<Result, in_chain>& chain, int first, const u32 (&A)[Result::row_blocks][4],
                           const u32 (&B)[2 * n]) {
  const Parts<2 * n> b(B);
#pragma unroll
  for (int block = 0; block < Result::row_blocks; ++block) {
    const Parts<4> a(A[block]);
#pragma unroll
    for (int c = 0; c < n; ++c) {
      if constexpr (is_three_products) {
        float(&small)[4] = chain.small[block][first + c];
        mma_tf32_k8(small, a.low, b.partner[2 * c], b.partner[2 * c + 1]);
        mma_tf32_k8(small, a.partner, b.low[2 * c], b.low[2 * c + 1]);
      }
      mma_tf32_k8(chain.large(block, first + c), a.high, b.high[2 * c], b.high[2 * c + 1]);
    }
  }
}

// A by rows: 16 x 8 of each row block.
template <class Result, class TileA>
DEVICE void load_A(u32 (&A)[Result::row_blocks][4], TileA& tile, u32 a0, int k) {
#pragma unroll
  for (int block = 0; block < Result::row_blocks; ++block)
    ldmatrix_x4(A[block], tile.along(a0, 2 * k) + block * 16 * TileA::cols * 4);
}

// One step of B[row0 ..][d0 + d], times A, for the pieces of a share from `first` on: lanes read B number by
// number.
template <class Result, int n, class TileB>
DEVICE void multiply_down(Chain<Result, n>& chain, int first, const u32 (&A)[Result::row_blocks][4], TileB& B,
                          int row0, int d0, int warp, int lane) {
#pragma unroll
  for (int c = 0; c < n; ++c) {
    const int d = d0 + Result::col(warp, 0, first + c) + lane / 4;
    const u32 b[2] = {bits_of(B.number(row0 + lane % 4, d)), bits_of(B.number(row0 + lane % 4 + 4, d))};
    multiply_parts<1>(chain, c, A, b);
  }
}

// ---- the three products of shares.cuh

template <class Result, int rows_a, int depth, int rows_b>
DEVICE void multiply_rows(Result& result, FloatTile<rows_a, depth>& A, FloatTile<rows_b, depth>& B,
                          int b_row0, int warp, int lane) {
  const u32 a0 = address_of_A(A, Result::first_row(warp), lane);
  const int b_lane = Result::n == 1 ? lane % 16 : lane;   // ldmatrix_x2 reads 8 rows
  const u32 b0 = address_of_B(B, b_row0 + Result::first_col(warp), b_lane);
  Chain<Result> chain(result, 0);
#pragma unroll MANY_STEPS
  for (int k = 0; k < depth / 8; ++k) {
    u32 a[Result::row_blocks][4];
    load_A<Result>(a, A, a0, k);
#pragma unroll
    for (int pair = 0; pair < n_pairs<Result>; ++pair) {
      u32 b[4];
      load_B<false, Result::n>(b, B.along(b0, 2 * k) + pair * 16 * Result::across * depth * 4);
      if constexpr (Result::n == 1) {
        const u32 half[2] = {b[0], b[1]};
        multiply_parts<1>(chain, 0, a, half);
      } else {
        multiply_parts<2>(chain, 2 * pair, a, b);
      }
    }
    if (is_three_products && k % chain_steps == chain_steps - 1) chain.flush(false);
  }
  chain.flush(true);
}

template <class Result, int rows, int depth, int cols>
DEVICE void multiply(Result& result, FloatTile<rows, depth>& A, FloatTile<depth, cols>& B, int warp,
                     int lane) {
  constexpr int n = n_at_once<Result>;
  const u32 a0 = address_of_A(A, Result::first_row(warp), lane);
#pragma unroll
  for (int first = 0; first < Result::n; first += n) {
    Chain<Result, n> chain(result, first);
#pragma unroll FEW_STEPS
    for (int k = 0; k < depth / 8; ++k) {
      u32 a[Result::row_blocks][4];
      load_A<Result>(a, A, a0, k);
      multiply_down(chain, first, a, B, 8 * k, 0, warp, lane);
    }
    chain.flush(true);
  }
}

template <class Result, int depth, int rows, int cols>
DEVICE void multiply_columns(Result& result, FloatTile<depth, rows>& A, FloatTile<depth, cols>& B, int d0,
                             int warp, int lane) {
  Chain<Result> chain(result, 0);
#pragma unroll MANY_STEPS
  for (int k = 0; k < depth / 8; ++k) {
    u32 a[Result::row_blocks][4];
#pragma unroll
    for (int block = 0; block < Result::row_blocks; ++block) {
      const int row = 8 * k + lane % 4, col = Result::first_row(warp) + block * 16 + lane / 4;
      a[block][0] = bits_of(A.number(row, col));
      a[block][1] = bits_of(A.number(row, col + 8));
      a[block][2] = bits_of(A.number(row + 4, col));
      a[block][3] = bits_of(A.number(row + 4, col + 8));
    }
    multiply_down(chain, 0, a, B, 8 * k, d0, warp, lane);
    if (is_three_products && k % chain_steps == chain_steps - 1) chain.flush(false);
  }
  chain.flush(true);
}

// tile[j][first + i] = part.  The caller synchronises.
template <class Part, int rows, int cols>
DEVICE void store_scores(Part& part, FloatTile<rows, cols>& tile, int first, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const int row = Part::row(warp, lane, r), key = tile.key(row);
#pragma unroll
    for (int c = 0; c < Part::n; ++c) {
      const int col = first + Part::col(warp, lane, c);
      tile.cells.template as<Pack<float, 2>>(row, (col / 4 ^ key) * 4 + col % 4) =
          Pack<float, 2>{{part.of_row(r, c, 0), part.of_row(r, c, 1)}};
    }
  }
}
