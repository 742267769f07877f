// pass_query_tiles.cu - before and after a Hopper backward: what lib/query_tiles.cuh keeps per query tile.
//
// pass_query_tiles__open    delta = rowsum(dO * O) - dlse and lse, padded to whole tiles;
//                           dQ sums = 0; dO in 16 bits where it has others
// pass_query_tiles__close   dQ = sum * scale, from the order of accumulators to rows; zeros where a query
//                           does not exist
// Grid         x: places (lib/query_tiles.cuh)
// Registers    __open: 8 numbers of O and 8 of dO a lane and 64 columns; __close: 4 x 16 bytes
// Bytes        __open: O, dO, lse, dlse once, rows and dQ sums once; __close: sums and dQ once
#include "lib/params.cuh"
#include "lib/accumulators.cuh"
#include "lib/dependent.cuh"
#include "lib/panels.cuh"
#include "lib/query_tiles.cuh"

constexpr int open_threads = 256, close_threads = 256;
constexpr int open_blocks = 4;   // on an SM: while some wait for O and dO others write zeros
constexpr int row_lanes = 8;     // of a row; each takes 8 numbers in every 64
constexpr int rows_at_once = open_threads / row_lanes, n_rounds = ceil_div(tile_q, rows_at_once);
static_assert(tile_q % 16 == 0 && head_dim_tile % 32 == 0, "pass_query_tiles: whole pieces");
static_assert(2 * tile_q <= open_threads, "pass_query_tiles: a counter a thread");

struct Eight {
  acc item[8];
};

// Chunk `at` of row r of the tile at `place`, as wgmma reads it: in 16 bits, then what those lose.
DEVICE void store_dO(const Args& args, i64 place, int r, int at, Eight numbers) {
  using Tile = PanelTile<tile_q, head_dim_v_tile>;
  const int line = at / (Tile::panel_cols / 8) * tile_q + r;
  const i64 first = line * Tile::panel_cols + Tile::place(r, at) * 8;
#pragma unroll
  for (int part = 0; part < dO_parts; ++part) {
    Vec16<elem> chunk;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      acc& left = numbers.item[e];
      chunk.item[e] = convert<elem>(left);
      left -= convert<acc>(chunk.item[e]);
      if (left != left) left = 0;   // infinity - infinity
    }
    Global<elem>(args.workspace[SLOT_DO])
        .store_as((part * all_places(args) + place) * (tile_q * head_dim_v_tile) + first, chunk);
  }
}

// row[d .. d + 8), zeros from `dim` on.
template <class From> DEVICE Eight load_eight(const Tensor& tensor, i64 first, i64 d, i64 dim) {
  const Global<From> from(tensor.data);
  constexpr int size = Vec16<From>::size;
  Eight numbers = {};
  if (tensor.vector_bytes == 16 && d + 8 <= dim) {
#pragma unroll
    for (int part = 0; part < 8; part += size) {
      const Vec16<From> chunk = from.template load_as<Vec16<From>>(first + d + part);
#pragma unroll
      for (int e = 0; e < size; ++e) numbers.item[part + e] = convert<acc>(chunk.item[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (d + e < dim) numbers.item[e] = convert<acc>(from.load(first + d + e));
  }
  return numbers;
}

KERNEL(open_threads, open_blocks) pass_query_tiles__open(const __grid_constant__ Args args) {
  next_kernel_may_start();
  const int thread = threadIdx.x, lane = thread % row_lanes;
  const i64 place = blockIdx.x;
  if (place == 0 && thread < 2 * tile_q)
    Global<i32>(args.workspace[SLOT_ROWS]).store(counter_index(args) + thread, 0);
  if (place >= all_places(args)) return;   // no queries: keys that nobody sees have gradients of 0
  const QueryTile own = query_tile_at(args, place);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  const i64 h = own.h, dim = args.head_dim_v;

  constexpr int tile_numbers = tile_q * head_dim_tile;
  if (in_turn && thread == 0) Global<i32>(args.workspace[SLOT_TURNS]).store(place * 2, 0);
#pragma unroll
  for (int at = 0; at < tile_numbers && !in_turn; at += open_threads * 4)
    if (tile_numbers % (open_threads * 4) == 0 || at + thread * 4 < tile_numbers)
      Global<acc>(args.workspace[SLOT_DQ]).store_as(place * tile_numbers + at + thread * 4, Vec16<acc>{});

#pragma unroll
  for (int n = 0; n < n_rounds; ++n) {
    const i32 r = n * rows_at_once + thread / row_lanes, i = own.i0 + r;
    const i64 row = seq.q_row0 + i;
    const bool exists = r < tile_q && i < seq.len_q;   // what does not exist is not read
    acc delta = 0, row_lse = -NEG_INF;
#pragma unroll
    for (int at = lane; at < head_dim_v_tile / 8; at += row_lanes) {
      Eight O = {}, dO = {};
      if (exists && at * 8 < dim) {
        O = load_eight<o_elem>(args.O, index_of(args.O, seq.array_b, h, row), at * 8, dim);
        dO = load_eight<dout_elem>(args.dO, index_of(args.dO, seq.array_b, h, row), at * 8, dim);
      }
      if constexpr (converts_dO)
        if (r < tile_q) store_dO(args, place, r, at, dO);
#pragma unroll
      for (int e = 0; e < 8; ++e)   // a row that attends to nothing has O = 0, and its dO may be NaN
        if (O.item[e] != 0) delta += O.item[e] * dO.item[e];
    }
    delta = warp_sum<row_lanes>(delta);
    if (lane != 0 || r >= tile_q) continue;
    if (exists) {
      if constexpr (has_dlse)
        delta -= Global<acc>(args.dlse.data).load(index_of(args.dlse, seq.array_b, h, row));
      const acc lse = Global<acc>(args.lse.data).load(index_of(args.lse, seq.array_b, h, row));
      if (lse != NEG_INF) row_lse = is_plain ? lse * LOG2E : lse;
    }
    const Global<acc> rows(args.workspace[SLOT_ROWS]);
    rows.store(place * 2 * tile_q + r, row_lse);
    rows.store((place * 2 + 1) * tile_q + r, delta);
  }
}

KERNEL(close_threads, 1) pass_query_tiles__close(const __grid_constant__ Args args) {
  previous_kernel_wait();   // all blocks have added
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 place = blockIdx.x;
  const QueryTile own = query_tile_at(args, place);
  if (!own.exists) return;
  const Sequence& seq = own.seq;
  bool was_met = true;   // by keys that its queries may see
  if constexpr (in_turn) {
    const i32 met = lane == 0 ? Global<i32>(args.workspace[SLOT_TURNS]).load(place * 2) : 0;
    was_met = shfl(met, 0) != 0;
  }
  constexpr int across = head_dim_tile / 32;   // a warp takes 16 queries and 32 columns at a time
#pragma unroll
  for (int at = warp; at < tile_q / 16 * across; at += close_threads / 32) {
    const int r = at / across, c0 = at % across * 4;
    float x[16] = {};
#pragma unroll
    for (int c = 0; c < 4 && was_met; ++c) {
      const Vec16<acc> four =
          Global<acc>(args.workspace[SLOT_DQ]).load_as<Vec16<acc>>(dQ_index(place, r, c0 + c, lane));
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * c + e] = four.item[e];
    }
    store_rows<out_elem>(x, static_cast<float>(args.scale), args.dQ.data,
                         tile_source(args.dQ, seq.array_b, seq.q_row0, own.h, own.i0, seq.rows_q, c0 * 8,
                                     args.head_dim),
                         16 * r, seq.len_q - own.i0, lane);
  }
}
