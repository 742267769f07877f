// products.cuh - products of two tiles in shared memory without tensor cores.
//
// Why these layouts.  A thread that keeps a rows x cols block of the result reads rows + cols numbers for
// rows * cols multiply-adds, 16 bytes at a time.  Both operands come from a Swizzled tile, in which 8 lanes
// that read the same column of 8 neighbouring row groups, or 8 neighbouring chunks of one row, meet 8
// different groups of banks.
#pragma once
#include "swizzled.cuh"

// Who holds what of a [n_rows, n_cols] result: warps_y x warps_x warps of lanes_y x lanes_x lanes.  A
// thread's rows come in groups of row_group, its columns in groups of one chunk, both strided over the tile.
template <class T, int n_rows, int n_cols, int warps, bool rows_by_chunk> struct Partition {
  static constexpr int width = Vec16<T>::size;
  static constexpr int lanes_x = n_cols / width >= 8 ? 8 : n_cols / width;
  static constexpr int lanes_y = 32 / lanes_x;
  DEVICE static constexpr bool fits(int wy) {
    return warps % wy == 0 && n_rows % (lanes_y * wy * (rows_by_chunk ? width : 1)) == 0 &&
           n_cols % (lanes_x * (warps / wy) * width) == 0;
  }
  DEVICE static constexpr int cost(int wy) {
    return n_rows / (lanes_y * wy) + n_cols / (lanes_x * (warps / wy));
  }
  DEVICE static constexpr int best() {   // the squarest block: fewest shared reads per multiply-add
    int found = 0;
    for (int wy = 1; wy <= warps; wy *= 2)
      if (fits(wy) && (found == 0 || cost(wy) < cost(found))) found = wy;
    return found;
  }
  static constexpr int warps_y = best();
  static_assert(warps_y > 0, "Partition: no way to divide this tile among the warps");
  static constexpr int warps_x = warps / (warps_y > 0 ? warps_y : 1);
  static constexpr int rows = n_rows / (lanes_y * warps_y);   // of one thread
  static constexpr int cols = n_cols / (lanes_x * warps_x);
  static constexpr int row_group = rows % width == 0 ? width : rows % 2 == 0 ? 2 : 1;
  static constexpr int col_groups = cols / width;

  int first_row;     // of this thread's first group
  int first_chunk;   // of this thread's first column group

  // Lane bits are interleaved (x takes bits 0, 2, 3 and y bits 1, 4): a 16-byte read that several lanes share
  // is then served to two quarter-warps at once.
  DEVICE explicit Partition(int thread) {
    const int lane = thread % 32, warp = thread / 32;
    int x = lane % lanes_x, y = lane / lanes_x;
    if constexpr (lanes_x == 8) {
      x = (lane & 1) | ((lane >> 1) & 6);
      y = ((lane >> 1) & 1) | ((lane >> 3) & 2);
    }
    first_row = ((warp / warps_x) * lanes_y + y) * row_group;
    first_chunk = (warp % warps_x) * lanes_x + x;
  }
  DEVICE int row(int r) const {
    return first_row + (r / row_group) * (lanes_y * warps_y * row_group) + r % row_group;
  }
  DEVICE int chunk(int group) const { return first_chunk + group * (lanes_x * warps_x); }
  DEVICE int col(int c) const { return chunk(c / width) * width + c % width; }
};

template <class T, int rows, int cols> DEVICE void clear(T (&block)[rows][cols]) {
#pragma unroll
  for (int r = 0; r < rows; r++)
#pragma unroll
    for (int c = 0; c < cols; c++) block[r][c] = T(0);
}

// Where this thread's rows lie: the first row of each group, and the key of its chunks.
template <class Part, class Tile> struct RowKeys {
  int row[Part::rows / Part::row_group], key[Part::rows / Part::row_group];
  DEVICE explicit RowKeys(const Part& mine) {
#pragma unroll
    for (int g = 0; g < Part::rows / Part::row_group; g++) {
      row[g] = mine.row(g * Part::row_group);
      key[g] = row[g] / Tile::width & Tile::mask;
    }
  }
};

// result[i][j] += sum over d of A[i][d] B[j][d]                    S = Q K^T,  dP = dO V^T
template <class Part, class T, int m, int n, int depth>
DEVICE void multiply_rows(const Part& mine, T (&result)[Part::rows][Part::cols], Swizzled<T, m, depth>& A,
                          Swizzled<T, n, depth>& B) {
  constexpr int width = Vec16<T>::size, group = Part::row_group;
  const RowKeys<Part, Swizzled<T, m, depth>> rows(mine);
#pragma unroll 1
  for (int d = 0; d < depth / width; d++) {
    Vec16<T> a[Part::rows];
#pragma unroll
    for (int r = 0; r < Part::rows; r++)
      a[r] = A.keyed(rows.row[r / group] + r % group, rows.key[r / group], d);
#pragma unroll
    for (int c = 0; c < Part::cols; c++) {
      const int chunk = mine.chunk(c / width);
      const Vec16<T> b = B.keyed(chunk * width + c % width, chunk & B.mask, d);
#pragma unroll
      for (int e = 0; e < width; e++)
#pragma unroll
        for (int r = 0; r < Part::rows; r++) result[r][c] = a[r].item[e] * b.item[e] + result[r][c];
    }
  }
}

// Column groups [first, first + groups) of multiply_columns.
template <int groups, class Part, class T, int depth, int m, int n>
DEVICE void multiply_column_groups(const Part& mine, T (&result)[Part::rows][Part::cols],
                                   Swizzled<T, depth, m>& A, Swizzled<T, depth, n>& B, int first) {
  constexpr int width = Vec16<T>::size;
  T part[Part::rows][groups * width];
  clear(part);
#pragma unroll 2
  for (int k = 0; k < depth / width; k++) {
#pragma unroll
    for (int e = 0; e < width; e++) {
      Vec16<T> a[Part::rows / width];
#pragma unroll
      for (int g = 0; g < Part::rows / width; g++)
        a[g] = A.keyed(k * width + e, k & A.mask, mine.row(g * width) / width);
#pragma unroll
      for (int g = 0; g < groups; g++) {
        const Vec16<T> b = B.keyed(k * width + e, k & B.mask, mine.chunk(first + g));
#pragma unroll
        for (int c = 0; c < width; c++)
#pragma unroll
          for (int r = 0; r < Part::rows; r++)
            part[r][g * width + c] = a[r / width].item[r % width] * b.item[c] + part[r][g * width + c];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < Part::rows; r++)
#pragma unroll
    for (int c = 0; c < groups * width; c++) result[r][first * width + c] += part[r][c];
}

// result[j][d] += sum over i of A[i][j] B[i][d]                    dV = P^T dO,  dK = dS^T Q
// The sum of a tile is made apart and then added: over thousands of queries the rounding errors of one long
// chain of additions would be several times as large.
template <class Part, class T, int depth, int m, int n>
DEVICE void multiply_columns(const Part& mine, T (&result)[Part::rows][Part::cols], Swizzled<T, depth, m>& A,
                             Swizzled<T, depth, n>& B) {
  static_assert(Part::row_group == Vec16<T>::size,
                "multiply_columns: rows of the result are columns of A, read by chunks");
  constexpr bool fits = Part::rows * Part::cols * sizeof(T) <= 48 * 4;   // registers for the sum of a tile
  constexpr int groups = fits ? Part::col_groups : 1;
#pragma unroll
  for (int first = 0; first < Part::col_groups; first += groups)
    multiply_column_groups<groups>(mine, result, A, B, first);
}

// result[i][d] += sum over j of A[i][j] B[j][d]                    dQ = dS K,  O = P V
template <class Part, class T, int m, int depth, int n>
DEVICE void multiply(const Part& mine, T (&result)[Part::rows][Part::cols], Swizzled<T, m, depth>& A,
                     Swizzled<T, depth, n>& B) {
  constexpr int width = Vec16<T>::size, group = Part::row_group;
  const RowKeys<Part, Swizzled<T, m, depth>> rows(mine);
#pragma unroll 1
  for (int k = 0; k < depth / width; k++) {
    Vec16<T> a[Part::rows];
#pragma unroll
    for (int r = 0; r < Part::rows; r++)
      a[r] = A.keyed(rows.row[r / group] + r % group, rows.key[r / group], k);
#pragma unroll
    for (int e = 0; e < width; e++)
#pragma unroll
      for (int g = 0; g < Part::col_groups; g++) {
        const Vec16<T> b = B.keyed(k * width + e, k & B.mask, mine.chunk(g));
#pragma unroll
        for (int c = 0; c < width; c++)
#pragma unroll
          for (int r = 0; r < Part::rows; r++)
            result[r][g * width + c] = a[r].item[e] * b.item[c] + result[r][g * width + c];
      }
  }
}

// target[r][d] = block * scale, for the rows and columns that are there; rows from `existing` on are 0
// whatever the block holds.
template <class To, class Part>
DEVICE void store_block(const Part& mine, const acc (&block)[Part::rows][Part::cols], acc scale, void* data,
                        const TileSource& target, i32 existing = 0x7fffffff) {
  constexpr int width = Vec16<acc>::size;
  const Global<To> to(data);
#pragma unroll
  for (int r = 0; r < Part::rows; r++) {
    const int row = mine.row(r);
    if (row >= target.rows) continue;
#pragma unroll
    for (int g = 0; g < Part::col_groups; g++) {
      const int d = mine.chunk(g) * width;
      const i64 index = target.base + row * target.stride + d;
      Pack<To, width> out;
#pragma unroll
      for (int c = 0; c < width; c++)
        out.item[c] = convert<To>(row < existing ? block[r][g * width + c] * scale : acc(0));
      if (sizeof(To) <= sizeof(acc) && target.by_vectors && d < target.cols) {
        to.store_as(index, out);
      } else {
#pragma unroll
        for (int c = 0; c < width; c++)
          if (d + c < target.cols) to.store(index + c, out.item[c]);
      }
    }
  }
}

// target[r][d] += block, atomically.
template <class Part> DEVICE void add_block(const Part& mine, const acc (&block)[Part::rows][Part::cols],
                                            void* data, const TileSource& target) {
  constexpr int width = Vec16<acc>::size;
  const Global<acc> to(data);
#pragma unroll
  for (int r = 0; r < Part::rows; r++) {
    const int row = mine.row(r);
    if (row >= target.rows) continue;
#pragma unroll
    for (int g = 0; g < Part::col_groups; g++) {
      const int d = mine.chunk(g) * width;
      const i64 index = target.base + row * target.stride + d;
      Vec16<acc> sum;
#pragma unroll
      for (int c = 0; c < width; c++) sum.item[c] = block[r][g * width + c];
      if (target.by_vectors && d < target.cols) {
        add_chunk(to, index, sum);
      } else {
#pragma unroll
        for (int c = 0; c < width; c++)
          if (d + c < target.cols) to.add(index + c, sum.item[c]);
      }
    }
  }
}

// tile = block.  The caller synchronises.
template <class Part, class T, int m, int n>
DEVICE void store_shared(const Part& mine, const T (&block)[Part::rows][Part::cols],
                         Swizzled<T, m, n>& tile) {
  constexpr int width = Vec16<T>::size;
#pragma unroll
  for (int r = 0; r < Part::rows; r++)
#pragma unroll
    for (int g = 0; g < Part::col_groups; g++) {
      Vec16<T> chunk;
#pragma unroll
      for (int c = 0; c < width; c++) chunk.item[c] = block[r][g * width + c];
      tile.chunk(mine.row(r), mine.chunk(g)) = chunk;
    }
}
