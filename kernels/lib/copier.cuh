// copier.cuh - tiles of one array by cp.async, one after the other.
#pragma once
#include "matrices.cuh"
#include "parts.cuh"

// A thread's part of the copies of tiles of K or V.  Threads stand side by side on `across` chunks and go
// down the rows in whole periods of the permutation, as in request_tile.
template <class Tile> struct Copier {
  static constexpr int chunks = Tile::cols / per_chunk, across = Tile::period, step = n_threads / across;
  static_assert(step % 8 == 0 && Tile::rows % 8 == 0, "Copier: steps are whole periods of the key");
  i64 first;   // index of row 0 of the sequence; of this thread's first number there, unless it is noted

  // begin: index of row 0.
  DEVICE Copier(i64 begin, const Tensor& tensor, int thread)
      : first(begin + (notes_begins ? 0 : thread / across * tensor.row + thread % across * per_chunk)) {}

  // tile = rows j, j + 1, .. of the sequence, of which `rows` are there; zeros fill the rest.  All threads of
  // the block; it is there after cp_async_wait and a block_sync.  The caller commits.
  DEVICE void request(Tile& tile, const Tensor& tensor, i32 j, i32 rows, i64 dim, int thread_) const {
    const int thread = n_stages == 1 && !notes_begins ? thread_ : opaque(thread_);   // registers are scarce
    const int row0 = thread / across, chunk0 = thread % across;
    const i64 mine = row0 * tensor.row + chunk0 * per_chunk;
    i64 index = first + j * tensor.row;
    if (tensor.vector_bytes != 16) {
      const i64 base = notes_begins ? index : index - mine;
      return load_tile(tile, tensor.data, {base, tensor.row, rows, static_cast<i32>(dim), false}, thread);
    }
    if constexpr (notes_begins) index += mine;
    const Global<elem> from(tensor.data);
    const u32 to = tile.address(row0 < Tile::rows ? row0 : 0, chunk0);
    const auto copy = [&](int down, int c, u32 n_bytes) {
      if (Tile::rows % step == 0 || row0 + down < Tile::rows)
        cp_async(to + (down * chunks + c) * 16, from.address(index + c * per_chunk, n_bytes), n_bytes);
    };
    if (rows >= Tile::rows && dim == Tile::cols) {
#pragma unroll
      for (int down = 0; down < Tile::rows; down += step, index += step * tensor.row)
#pragma unroll
        for (int c = 0; c < chunks; c += across) copy(down, c, 16);
    } else {
#pragma unroll
      for (int down = 0; down < Tile::rows; down += step, index += step * tensor.row)
#pragma unroll
        for (int c = 0; c < chunks; c += across)
          copy(down, c, row0 + down < rows && (chunk0 + c) * per_chunk < dim ? 16 : 0);
    }
  }
};
