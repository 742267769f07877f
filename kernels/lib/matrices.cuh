// matrices.cuh - tiles of 16-bit numbers (or floats) in shared memory, as ldmatrix reads them and mma.sync
// wants them.
#pragma once
#include "cp_async.cuh"
#include "ldmatrix.cuh"
#include "mma.cuh"
#include "swizzled.cuh"
#include "warp.cuh"

// chunk: 8 neighbouring numbers (4 floats), 16 bytes, what ldmatrix reads at once.
constexpr int per_chunk = Vec16<elem>::size;

// Rows as they are: the 8 rows of a matrix start in the same bank when a row is a multiple of 128 bytes.
template <int n_rows_, int n_cols> struct PlainTile {
  static constexpr int rows = n_rows_, cols = n_cols;
  Shared<elem, rows, cols> cells;
  DEVICE Vec16<elem>& chunk(int row, int at) { return cells.template as<Vec16<elem>>(row, at * per_chunk); }
  DEVICE u32 address(int row, int at) { return cells.address(row, at * per_chunk); }
  // address(row, at + first) from address(row, first), `at` a multiple of 2, first 0 or 1.
  DEVICE static u32 along(u32 address, int at) { return address + at * 16; }
};

// Chunk c of a row lies at chunk c xor key(row): 8 rows of one chunk fill all 32 banks.  Rows that are no
// multiple of 128 bytes start in different banks already: fewer chunks change places, every other row.
template <int n_rows_, int n_cols> struct XorTile {
  static constexpr int rows = n_rows_, cols = n_cols, chunks = cols / per_chunk;
  static constexpr int period = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;   // chunks that change places
  Shared<elem, rows, cols> cells;
  DEVICE static int key(int row) { return row / (8 / period) & (period - 1); }
  DEVICE Vec16<elem>& chunk(int row, int at) {
    return cells.template as<Vec16<elem>>(row, (at ^ key(row)) * per_chunk);
  }
  DEVICE u32 address(int row, int at) { return cells.address(row, (at ^ key(row)) * per_chunk); }
  // As above, for a tile whose address is a multiple of 128: one xor with a constant.
  DEVICE static u32 along(u32 address, int at) {
    return (address ^ at % period * 16) + at / period * period * 16;
  }
  // The same chunk `rows` further down, a multiple of 16: a distance, because 16 rows are whole periods.
  DEVICE static constexpr u32 down(int rows) { return rows * n_cols * sizeof(elem); }
};

// tile[r][d] = source through registers.  All threads of the block; the caller synchronises.
template <class Tile>
DEVICE void load_tile(Tile& tile, const void* data, const TileSource& source, int thread) {
  constexpr int chunks = Tile::cols / per_chunk, n = Tile::rows * chunks;
  const Global<elem> from(const_cast<void*>(data));
  const int first = opaque(thread);
  if (source.by_vectors) {
#pragma unroll 4
    for (int at = first; at < n; at += n_threads) {
      const int row = at / chunks, d = at % chunks * per_chunk;
      Vec16<elem> chunk = {};
      if (row < source.rows && d < source.cols)
        chunk = from.template load_as<Vec16<elem>>(source.base + row * source.stride + d);
      tile.chunk(row, at % chunks) = chunk;
    }
  } else {
#pragma unroll 1
    for (int at = first; at < n; at += n_threads) {
      const int row = at / chunks, d = at % chunks * per_chunk;
      const i64 index = source.base + row * source.stride + d;
      Vec16<elem> chunk;
#pragma unroll
      for (int e = 0; e < per_chunk; ++e) {
        chunk.item[e] = {};
        if (row < source.rows && d + e < source.cols) chunk.item[e] = from.load(index + e);
      }
      tile.chunk(row, at % chunks) = chunk;
    }
  }
}

// tile[r][d] = source by cp.async, where chunks can be read whole; else through registers.  All threads of
// the block; it is there after cp_async_wait and a block_sync.  The caller commits.
//
// Threads stand side by side on `across` chunks, as many as change places, and go down the rows in steps
// that are whole periods of the permutation: every copy then lies at a constant distance from the first.
template <class Tile>
DEVICE void request_tile(Tile& tile, const void* data, const TileSource& source, int thread) {
  if (!source.by_vectors) return load_tile(tile, data, source, thread);
  constexpr int chunks = Tile::cols / per_chunk, across = Tile::period, step = n_threads / across;
  static_assert(step % 8 == 0 && Tile::rows % 8 == 0, "request_tile: steps are whole periods of the key");
  const Global<elem> from(const_cast<void*>(data));
  const int row0 = opaque(thread) / across, chunk0 = thread % across;
  const u32 target = tile.address(row0 < Tile::rows ? row0 : 0, chunk0);
  const bool is_whole = source.rows >= Tile::rows && source.cols == Tile::cols;   // else zeros fill the rest
  i64 index = source.base + row0 * source.stride + chunk0 * per_chunk;
#pragma unroll
  for (int down = 0; down < Tile::rows; down += step, index += step * source.stride)
#pragma unroll
    for (int c = 0; c < chunks; c += across) {
      const bool is_there = is_whole || (row0 + down < source.rows && (chunk0 + c) * per_chunk < source.cols);
      const u32 n_bytes = is_there ? 16 : 0;
      if (Tile::rows % step == 0 || row0 + down < Tile::rows)
        cp_async(target + (down * chunks + c) * 16, from.address(index + c * per_chunk, n_bytes), n_bytes);
    }
}

// ---- addresses of the operands of mma, for chunk 0: the lane's row and chunk.  Others lie `along` the row.

// A: rows row0 .. + 16.  Registers of one ldmatrix_x4 are a[0..3] of a k16 step, which is 2 chunks.
template <class Tile> DEVICE u32 address_of_A(Tile& tile, int row0, int lane) {
  return tile.address(row0 + lane % 16, lane / 16);
}
// B of S = Q K^T, K as it lies: keys row0 .. + 16.  b0, b1 of keys + 0 .. 8, then of + 8 .. 16.
template <class Tile> DEVICE u32 address_of_B(Tile& tile, int row0, int lane) {
  return tile.address(row0 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// B of O = P V by ldmatrix_x4_trans: keys row0 .. + 16 are k.  b0, b1 of columns + 0 .. 8, then of + 8 .. 16.
template <class Tile> DEVICE u32 address_of_B_trans(Tile& tile, int row0, int lane) {
  return tile.address(row0 + lane % 16, lane / 16);
}

// The k16 step of P's A operand that pieces 2k and 2k + 1 of S hold already.
template <class T = elem>
DEVICE void repack(u32 (&P)[4], const float (&low)[4], const float (&high)[4]) {
  P[0] = pack<T>(low[0], low[1]);
  P[1] = pack<T>(low[2], low[3]);
  P[2] = pack<T>(high[0], high[1]);
  P[3] = pack<T>(high[2], high[3]);
}

// x[n] of lane t of a quad <- x[t] of lane n.
DEVICE void transpose_quad(u32 (&x)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (!(n & step)) {
        const bool upper = lane & step;
        const u32 got = shfl_xor(upper ? x[n] : x[n + step], step);
        (upper ? x[n] : x[n + step]) = got;
      }
}
