// mma_gradient.cuh - the backward's products on tensor cores, and what happens to a tile between them.
//
// Scores come transposed, S^T[j][i]: rows are keys.  A warp multiplies 16 rows of A by 8 columns of B:
//
//   product            A            B            in shared memory   read by
//   S^T  += K Q^T      K[j][d]      Q[i][d]      as they lie        ldmatrix, ldmatrix           multiply_rows
//   dP^T += V dO^T     V[j][d]      dO[i][d]     as they lie        ldmatrix, ldmatrix           multiply_rows
//   dV   += P^T dO     P^T[j][i]    dO[i][d]     k is B's row       ldmatrix, ldmatrix.trans     multiply
//   dK   += dS^T Q     dS^T[j][i]   Q[i][d]      k is B's row       ldmatrix, ldmatrix.trans     multiply
//   dQ   += dS K       dS^T[j][i]   K[j][d]      k is both's row    ldmatrix.trans, .trans       multiply_columns
#pragma once
#include "barrier.cuh"
#include "gradient.cuh"
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

// What a warp holds of a product of [n_rows, n_cols] that all warps of the block, or some, share.  Rows lie in one
// piece; columns alternate between the warps, 16 at a time, so that every warp reads at constant distances.
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
DEVICE void multiply_step(Result& result, int pair, const u32 (&A)[Result::row_blocks][4], const u32 (&B)[4]) {
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

// Where the blocks of two warps would be small, half of the warps makes S^T and the other half dP^T in blocks
// twice as high, and pairs of warps trade: each gives one of its two row blocks for the other's.
template <class Half> struct Trade {
  Shared<float, n_warps * Half::n, 128> pieces;

  // S, dP <- the row block that stays here, of the warp's own product and of its partner's.
  template <class Part> DEVICE void operator()(Half& mine, Part& S, Part& dP, int warp, int lane) {
    static_assert(Half::row_blocks == 2 && Part::row_blocks == 1 && Half::n == Part::n, "Trade: two for one");
    const bool makes_dP = warp >= n_warps / 2;
#pragma unroll
    for (int c = 0; c < Half::n; ++c) {
      Vec16<float> piece;
#pragma unroll
      for (int e = 0; e < 4; ++e) piece.item[e] = makes_dP ? mine.at[0][c][e] : mine.at[1][c][e];
      pieces.template as<Vec16<float>>(warp * Half::n + c, lane * 4) = piece;
    }
    barrier_sync(1 + warp % (n_warps / 2), 64);   // both of the pair have given
#pragma unroll
    for (int c = 0; c < Half::n; ++c) {
      const int from = (warp + n_warps / 2) % n_warps * Half::n + c;
      const Vec16<float> piece = pieces.template as<Vec16<float>>(from, lane * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S.at[0][c][e] = makes_dP ? piece.item[e] : mine.at[0][c][e];
        dP.at[0][c][e] = makes_dP ? mine.at[1][c][e] : piece.item[e];
      }
    }
  }
};

// ---- P and dS

// Nothing but the scale changes a score: P is one multiply-add and one exponential, in base 2.
constexpr bool is_plain = !has_softcap && !has_alibi && !has_bias && !has_dropout;

// What the rows of a query tile give to all their scores: lse (base 2 and +inf for a row that attends to nothing
// where is_plain: pass_delta made it; else as given) and delta.  Zeros for rows that do not exist: their Q and
// dO are zeros too, and so is dS, whatever P is.
template <int stages> struct TileNumbers {
  Shared<float, stages, tile_q> lse;
  Shared<float, stages, tile_q> delta;

  // Of rows i0 .. of query head h.  Asked for by cp.async (the caller commits) or loaded.
  template <bool is_async>
  DEVICE void load(const Args& args, const Sequence& seq, i64 h, i32 i0, int stage, int thread) {
    if (thread >= tile_q) return;
    const PerRow& rows = is_plain ? args.lse_log2 : args.lse;
    const i64 row = seq.q_row0 + i0 + thread;
    const bool exists = i0 + thread < seq.len_q;
    const Global<float> from(rows.data), deltas(args.delta.data);
    const i64 at = index_of(rows, seq.array_b, h, row), at_delta = index_of(args.delta, seq.array_b, h, row);
    if constexpr (is_async) {
      const u32 n_bytes = exists ? 4 : 0;
      cp_async<4>(lse.address(stage, thread), from.address(at, n_bytes), n_bytes);
      cp_async<4>(delta.address(stage, thread), deltas.address(at_delta, n_bytes), n_bytes);
    } else {
      lse(stage, thread) = exists ? from.load(at) : 0.f;
      delta(stage, thread) = exists ? deltas.load(at_delta) : 0.f;
    }
  }
  // Two neighbouring rows from `row` on.
  DEVICE Pack<float, 2> lse_of(int stage, int row) {
    Pack<float, 2> pair = lse.template as<Pack<float, 2>>(stage, row);
    if constexpr (!is_plain)
      for (int e = 0; e < 2; ++e)   // gradient_of wants +inf where a row attends to nothing
        if (pair.item[e] == NEG_INF) pair.item[e] = -NEG_INF;
    return pair;
  }
};

// Bits 2h + e: is the weight of (column e, row half h) of this lane kept?  Philox gives 4 neighbouring keys
// of a query at once: the 4 lanes that hold them make one of their 4 calls each and tell the others.
DEVICE u32 dropout_keeps_piece(const Dropout& dropout, i32 i, i32 j_first, int lane) {
  const int turn = lane / 4 % 4;
  const i32 j = j_first + lane / 16 * 4 + turn / 2 * 8;
  u32 bits = dropout_keeps_4(dropout, i + turn % 2, j) << 4 * turn;
  bits |= shfl_xor(bits, 4);
  bits |= shfl_xor(bits, 8);
  bits >>= turn;
  return (bits & 1) | (bits >> 3 & 2) | (bits >> 6 & 4) | (bits >> 9 & 8);
}

// S <- P, dP <- dS.  i0: of column 0, j0: of the tile.  tests: some element may be hidden; is_kept(i, j) is
// the block mask.  visit(r, i, j, d_score): called for every visible element; r is the lane's row.
template <bool tests, class Part, class Numbers, class Kept, class Visit>
DEVICE void share_gradient(const Args& args, Numbers& numbers, int stage, Part& S, Part& dP,
                           const Sequence& seq, const HeadRules& rules, float scale_log2, i32 i0, i32 first,
                           i32 j0, int warp, int lane, Kept is_kept, Visit visit) {
  Range queries[Part::n_rows];
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const i32 j = j0 + Part::row(warp, lane, r);
    queries[r] = tests ? visible_queries(args, seq, j, j) : Range{0, 0};
  }
#pragma unroll
  for (int c = 0; c < Part::n; ++c) {
    const int col = first + Part::col(warp, lane, c);
    const Pack<float, 2> lse = numbers.lse_of(stage, col);
    const Pack<float, 2> delta = numbers.delta.template as<Pack<float, 2>>(stage, col);
#pragma unroll
    for (int a = 0; a < Part::row_blocks; ++a) {
      u32 keeps = ~0u;
      if constexpr (has_dropout)
        keeps = dropout_keeps_piece(rules.dropout, i0 + col, j0 + Part::first_row(warp) + 16 * a, lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = 2 * a + e / 2;
        const i32 i = i0 + col + e % 2, j = j0 + Part::row(warp, lane, r);
        float &score = S.at[a][c][e], &dscore = dP.at[a][c][e];
        Gradient gradient = {};
        const bool is_inside = !tests || (i >= queries[r].begin && i < queries[r].end);
        if (!tests || (visible(args, rules.masking, {0, is_inside ? 0x7fffffff : 0}, i, j) && is_kept(i, j))) {
          if constexpr (is_plain) {
            gradient.P = exp2_approx(score * scale_log2 - lse.item[e % 2]);
            gradient.dS = gradient.P * (dscore - delta.item[e % 2]);
          } else {
            gradient = gradient_of(args, rules, lse.item[e % 2], delta.item[e % 2], score, dscore,
                                   keeps >> e & 1, i, j);
            visit(r, i, j, gradient.d_score);
          }
        }
        score = gradient.P;
        dscore = gradient.dS;
      }
    }
  }
}

// ---- results

// tile[j][first + i] = part, in 16 bits.  The caller synchronises.
template <class Part, class Tile>
DEVICE void store_16(Part& part, Tile& tile, int first, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < Part::n_rows; ++r) {
    const int row = Part::row(warp, lane, r), key = Tile::key(row);
#pragma unroll
    for (int c = 0; c < Part::n; ++c) {
      const int col = first + Part::col(warp, lane, c);
      tile.cells.template as<u32>(row, (col / 8 ^ key) * 8 + col % 8) =
          pack<elem>(part.of_row(r, c, 0), part.of_row(r, c, 1));
    }
  }
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

// target = part * scale; rows from `existing` on are 0 whatever the part holds.
template <class To, class Part>
DEVICE void store_share(Part& part, float scale, void* data, const TileSource& target, i32 existing, int warp,
                        int lane) {
  const Global<To> to(data);
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

// ---- loads and places

// Tiles that hold dO.  An array of another dtype comes in 16-bit parts, else its rounding would add to that of
// P; in as many as float32 has bits for, where the gradient of the slopes is a float32 sum of dP.
constexpr int dO_parts = is_same<dout_elem, elem> ? 1 : wants_dalibi && is_same<elem, bf16> ? 3 : 2;

// tiles = dO, whatever its dtype, asked for or loaded: each holds what the one before has lost.
template <bool is_async, class Tile>
DEVICE void load_dO(Tile (&tiles)[dO_parts], const void* data, const TileSource& source, int thread) {
  if constexpr (is_same<dout_elem, elem>) {
    if constexpr (is_async) request_tile(tiles[0], data, source, thread);
    else load_tile(tiles[0], data, source, thread);
  } else {
    const Global<dout_elem> from(const_cast<void*>(data));
    for (int at = thread; at < Tile::rows * Tile::cols / 8; at += n_threads) {
      const int row = at / (Tile::cols / 8), d = at % (Tile::cols / 8) * 8;
      Vec16<elem> chunks[dO_parts];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float rest = 0;
        if (row < source.rows && d + e < source.cols)
          rest = convert<float>(from.load(source.base + row * source.stride + d + e));
#pragma unroll
        for (int part = 0; part < dO_parts; ++part) {
          chunks[part].item[e] = convert<elem>(rest);
          rest -= convert<float>(chunks[part].item[e]);
        }
      }
#pragma unroll
      for (int part = 0; part < dO_parts; ++part) tiles[part].chunk(row, d / 8) = chunks[part];
    }
  }
}

constexpr i64 SECTION_BYTES = 24 << 20;   // of Q, dO and the sums of dQ: half of the L2 of a large GPU

// What block x of the grid n_slots * heads_k owns: heads in sections whose rows fit the L2 cache together, and
// a section is finished before the next begins.  Inside it heads alternate and tiles go up: with causal the
// heaviest lead.  Of one head, a smaller x has the smaller tile.
DEVICE KeyTile key_tile_in_section(const Args& args, i64 x) {
  if constexpr (is_packed) return key_tile_of(args, x, tile_kv, args.heads_k);
  const i64 n_tiles = ceil_div(args.len_k, tile_kv), key_heads = args.batch * args.heads_k;
  const i64 row_bytes = args.head_dim * (sizeof(elem) + sizeof(float)) + args.head_dim_v * sizeof(dout_elem);
  const i64 bytes = largest<i64>(args.len_q * row_bytes * (args.heads / args.heads_k), 1);
  const i64 wide = clamp<i64>(SECTION_BYTES / bytes, 1, key_heads);
  const i64 section = x / (wide * n_tiles), place = x % (wide * n_tiles);
  const i64 here = smallest(wide, key_heads - section * wide);   // the last one may be smaller
  const i64 head = section * wide + place % here;
  KeyTile t;
  t.h = head % args.heads_k;
  t.seq = sequence_of(args, head / args.heads_k);
  t.j0 = static_cast<i32>(place / here) * tile_kv;
  t.exists = true;
  return t;
}

// Where rows of one (sequence, head) lie: queries from i0 on, keys from j0 on.  end: the first row not to be
// touched.  d0: the first column.
DEVICE TileSource query_rows(const Tensor& tensor, const Sequence& seq, i64 h, i32 i0, i32 end, i64 dim,
                             i32 d0 = 0) {
  return tile_source(tensor, seq.array_b, seq.q_row0, opaque(static_cast<int>(h)), i0, end, d0, dim);
}
DEVICE TileSource key_rows(const Tensor& tensor, const Sequence& seq, i64 h_k, i32 j0, i32 end, i64 dim) {
  return tile_source(tensor, seq.array_b, seq.k_row0, h_k, j0, end, 0, dim);
}
