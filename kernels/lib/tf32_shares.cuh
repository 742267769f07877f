// tf32_shares.cuh - shares.cuh for float32: products by TF32 mma, one each, or three each that keep float32's bits.
//
// x = high + low, both TF32 (11 bits); a b = low high + high low + high high leaves an error of 2^-22.  Tensor
// cores round sums toward zero, so a sum that goes on from tile to tile is made apart for each tile and added.
//
// mma_tf32_k8 takes k in steps of 8.  Where k runs along the rows of memory ldmatrix reads operands (a row of 16
// bytes is 4 numbers); where it runs down the columns, lanes read number by number: 4 rows x 8 columns at once.
#pragma once
#include "shares.cuh"

constexpr bool is_three_products = precision_code != 1;

// Chunk c (4 numbers) of a row lies at c xor key(row).  Keys of 8 rows are distinct, so ldmatrix reads one chunk
// of 8 rows without conflicts; keys of 4 neighbouring rows differ above their lowest bit, so 8 columns of 4 rows
// are read without conflicts too.
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

// tile[r][d] = source by cp.async where chunks can be read whole, else through registers.  The caller commits.
template <int rows, int cols>
DEVICE void request_tile(FloatTile<rows, cols>& tile, const void* data, const TileSource& source, int thread) {
  const Global<float> from(const_cast<void*>(data));
  constexpr int chunks = cols / 4, n = rows * chunks;
  const int first = opaque(thread);
#pragma unroll 4
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

template <int n> struct Parts {
  u32 high[n], low[n];
  DEVICE void operator()(const float (&x)[n]) {
#pragma unroll
    for (int e = 0; e < n; ++e) {
      high[e] = to_tf32(x[e]);
      if constexpr (is_three_products) low[e] = to_tf32(x[e] - __builtin_bit_cast(float, high[e]));
    }
  }
  DEVICE void operator()(const u32 (&bits)[n]) {
    float x[n];
#pragma unroll
    for (int e = 0; e < n; ++e) x[e] = __builtin_bit_cast(float, bits[e]);
    (*this)(x);
  }
};

// The pieces of a share, n of them from `first` on, times a step of 8: B has two numbers for each piece.
template <class Result, int n>
DEVICE void multiply_parts(Result& result, int first, const Parts<4> (&A)[Result::row_blocks],
                           const Parts<2 * n>& B) {
#pragma unroll
  for (int a = 0; a < Result::row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < n; ++c) {
      float(&d)[4] = result.at[a][first + c];
      if constexpr (is_three_products) {   // the small ones first
        mma_tf32_k8(d, A[a].low, B.high[2 * c], B.high[2 * c + 1]);
        mma_tf32_k8(d, A[a].high, B.low[2 * c], B.low[2 * c + 1]);
      }
      mma_tf32_k8(d, A[a].high, B.high[2 * c], B.high[2 * c + 1]);
    }
}

// A by rows: 16 x 8 of each row block.
template <class Result, class TileA>
DEVICE void load_A(Parts<4> (&A)[Result::row_blocks], TileA& tile, u32 a0, int k) {
#pragma unroll
  for (int block = 0; block < Result::row_blocks; ++block) {
    u32 bits[4];
    ldmatrix_x4(bits, tile.along(a0, 2 * k) + block * 16 * TileA::cols * 4);
    A[block](bits);
  }
}

// One step of B[8 k ..][d0 + d], times A: lanes read B number by number.
template <class Result, class TileB>
DEVICE void multiply_down(Result& result, const Parts<4> (&A)[Result::row_blocks], TileB& B, int row0, int d0,
                          int warp, int lane) {
#pragma unroll
  for (int c = 0; c < Result::n; ++c) {
    const int d = d0 + Result::col(warp, 0, c) + lane / 4;
    const float numbers[2] = {B.number(row0 + lane % 4, d), B.number(row0 + lane % 4 + 4, d)};
    Parts<2> b;
    b(numbers);
    multiply_parts<Result, 1>(result, c, A, b);
  }
}

// ---- the three products of shares.cuh

template <class Result, int rows_a, int depth, int rows_b>
DEVICE void multiply_rows(Result& result, FloatTile<rows_a, depth>& A, FloatTile<rows_b, depth>& B, int b_row0,
                          int warp, int lane) {
  const u32 a0 = address_of_A(A, Result::first_row(warp), lane);
  const int b_lane = Result::n == 1 ? lane % 16 : lane;   // ldmatrix_x2 reads 8 rows
  const u32 b0 = address_of_B(B, b_row0 + Result::first_col(warp), b_lane);
#pragma unroll 4
  for (int k = 0; k < depth / 8; ++k) {
    Parts<4> a[Result::row_blocks];
    load_A<Result>(a, A, a0, k);
#pragma unroll
    for (int pair = 0; pair < n_pairs<Result>; ++pair) {
      u32 bits[4];
      load_B<false, Result::n>(bits, B.along(b0, 2 * k) + pair * 16 * Result::across * depth * 4);
      if constexpr (Result::n == 1) {
        const u32 half[2] = {bits[0], bits[1]};
        Parts<2> b;
        b(half);
        multiply_parts<Result, 1>(result, 0, a, b);
      } else {
        Parts<4> b;
        b(bits);
        multiply_parts<Result, 2>(result, 2 * pair, a, b);
      }
    }
  }
}

template <class Result, int rows, int depth, int cols>
DEVICE void multiply(Result& result, FloatTile<rows, depth>& A, FloatTile<depth, cols>& B, int warp, int lane) {
  const u32 a0 = address_of_A(A, Result::first_row(warp), lane);
  Result of_tile;
  of_tile.clear();
#pragma unroll 4
  for (int k = 0; k < depth / 8; ++k) {
    Parts<4> a[Result::row_blocks];
    load_A<Result>(a, A, a0, k);
    multiply_down(of_tile, a, B, 8 * k, 0, warp, lane);
  }
#pragma unroll
  for (int a = 0; a < Result::row_blocks; ++a)
#pragma unroll
    for (int c = 0; c < Result::n; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) result.at[a][c][e] += of_tile.at[a][c][e];
}

template <class Result, int depth, int rows, int cols>
DEVICE void multiply_columns(Result& result, FloatTile<depth, rows>& A, FloatTile<depth, cols>& B, int d0,
                             int warp, int lane) {
#pragma unroll 4
  for (int k = 0; k < depth / 8; ++k) {
    Parts<4> a[Result::row_blocks];
#pragma unroll
    for (int block = 0; block < Result::row_blocks; ++block) {
      const int row = 8 * k + lane % 4, col = Result::first_row(warp) + block * 16 + lane / 4;
      const float numbers[4] = {A.number(row, col), A.number(row, col + 8), A.number(row + 4, col),
                                A.number(row + 4, col + 8)};
      a[block](numbers);
    }
    multiply_down(result, a, B, 8 * k, d0, warp, lane);
  }
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
