// bwd_07_cluster.cu - attention backward for head_dim up to 256: two blocks share Q and dO.   sm_90a
//
// Read after   bwd_06_specialize.cu       Read next   nothing: the last backward rung
// Changes      dK and dV of 256 columns fill the registers of 64 keys, not of 128.  So a cluster of two blocks
//              takes 128 keys, and what would double is shared: Q and dO are loaded once for both, each block
//              makes dQ of all 128 keys, but of half of the columns, and the warpgroups divide the products
//              and not the keys
//
// Algorithm    = tiled_backward.backward.   One cluster: 128 keys of one (sequence, key head), 64 a block.
//                K, V -> shared, once; and of the peer's K the columns whose dQ this block makes
//                for each query head of the group, each tile of 64 queries that sees these keys:
//                  weights   S^T = K Q^T,   P = 2^(S - lse)            dV += P^T dO     P -> the other group
//                  gradients dP^T = V dO^T, dS = P (dP - delta)        dK += dS^T Q     dS -> both blocks
//                  both      dQ sums += dS K, one tile late: its columns are shared out among the four
//                dK * scale, dV -> memory                (pass_query_tiles__close makes dQ of the sums)
// Grid         x: rank + 2 * (tile of 128 keys + tiles * (sequence, key head)): clusters of one head run
//              together, they read the same Q and dO
// Groups       0 loader (a warp) and, where rows beyond a length must not leak, cleaner (a warp)
//              1 weights   2 gradients
// Shared       K, V [64, .] | K_peer [64, 128] | Q [2][64, .], dO [N_STAGES][64, .] | dS [2][own, peer][64, 64]
//              | P [2], as registers | lse, delta | steps | barriers              panels (lib/panels.cuh)
// Registers    per thread: dV or dK 128, S or dP 32, dQ 32, P or dS packed 16; loader 24, the others 240
// Bytes        per block: K, V, dK, dV once; half of Q and dO, an addition to half of dQ per query tile
// Barriers     <operand>_full: landed.  Q_empty, dO_empty, dS_empty: both groups of both blocks have used it.
//              S_read, dP_read: lse and the step, delta have been read.  P_full, P_empty between the groups, by
//              number.  may_add, added, announced: turns
#include "lib/params.cuh"
#include "lib/accumulators.cuh"
#include "lib/barrier.cuh"
#include "lib/cluster.cuh"
#include "lib/key_rows.cuh"
#include "lib/maps.cuh"
#include "lib/mbarrier.cuh"
#include "lib/panels.cuh"
#include "lib/query_tiles.cuh"

constexpr int SLOT_DALIBI = 0;   // workspace: acc [slots of blocks' keys, heads], parts of dalibi_slopes
constexpr int SLOT_DBIAS = 1;    // workspace: acc [batch, heads, len_k], dbias summed over the queries

constexpr int own_keys = tile_kv / 2;   // of one block
static_assert(tile_q == 64 && own_keys == 64 && n_warps == 12, "bwd_07_cluster: its tile is fixed");

// Columns of dQ: a block makes half of them, its weights group the first of these.
constexpr int weights_cols = head_dim_tile == 128 ? 32 : 64;
constexpr int gradients_cols = head_dim_tile / 2 - weights_cols;
constexpr int peer_cols = head_dim_tile == 128 ? 64 : 128;   // whole panels
DEVICE int first_peer_col(int rank) { return rank * (head_dim_tile == 192 ? 64 : head_dim_tile / 2); }
DEVICE int first_weights_col(int rank) { return rank * (head_dim_tile == 192 ? 128 : head_dim_tile / 2); }
DEVICE int first_gradients_col(int rank) {
  return head_dim_tile == 192 ? 64 + 32 * rank : first_weights_col(rank) + weights_cols;
}

using Walk = BlockWalk<tile_kv, tile_q, block_kv, block_q>;   // owns the cluster's keys, walks queries
constexpr bool asks_blocks = has_block_mask && (deterministic || !Walk::Shape::tiles_are_whole);
// Where dS needs more of P than its 16 bits, P travels as float, alone in its buffer; softcap's slopes beside it.
constexpr bool is_exact = keeps_weights;
constexpr int n_P = is_exact ? 1 : 2, n_Q = has_softcap || asks_blocks || converts_dO ? 1 : 2;
// k16 steps of K^T and V^T, the first operands of S and dP, that stay in registers where there is room: shared
// memory is as busy as the tensor cores.
constexpr bool has_room = head_dim_tile <= 192 && head_dim_v_tile <= 192 && !is_exact && is_plain;
constexpr int held_K = has_room ? 4 : 0, held_V = has_room ? head_dim_v_tile / 16 : 0;
constexpr int n_dO = converts_dO ? 1 : n_stages;
// TMA reads the neighbour's rows past a sequence's end; weights of 0 meet them, and 0 x NaN is NaN.
constexpr bool cleans_queries = is_packed || has_query_lengths, cleans_keys = is_packed || has_key_lengths;

// One tile of queries of one query head: what the loader tells the groups, beside Q's stage.
struct alignas(16) Step {
  i32 i0;
  i32 h;
  u32 flags;
  i32 place;   // of the sums of its dQ (lib/query_tiles.cuh)
  DEVICE bool exists() const { return flags & 1; }
  DEVICE bool is_last() const { return flags & 2; }
  DEVICE bool tests() const { return flags & 4; }   // some pair may be hidden
};

// dQ of a step is added two steps later: what the loader told is kept until both groups have passed that.
constexpr int n_steps = 8;

struct Smem : KeptBlocks<Walk, asks_blocks, 2> {
  PanelTile<own_keys, head_dim_tile> K;
  PanelTile<own_keys, head_dim_v_tile> V;
  PanelTile<own_keys, peer_cols> K_peer;
  PanelTile<tile_q, head_dim_tile> Q[n_Q][1];
  PanelTile<tile_q, head_dim_v_tile> dO[n_dO][dO_parts];
  PanelTile<own_keys, tile_q> dS[2][2];   // transposed; [1]: of the peer's keys
  Shared<u32, 8 * 128 * (has_softcap ? 2 : 1), 4> P;   // thread by thread, 16 bytes at a time
  Shared<float, n_Q, tile_q> lse;
  Shared<float, 2, tile_q> delta;
  Shared<i32, n_steps, 4> steps;
  Shared<float, 1, 4> sums;   // of dalibi_slopes, a number per warp
  Shared<u64, 1, 1> K_full, V_full;   // V_full: of V and K_peer
  Shared<u64, 1, n_Q> Q_landed, Q_full, Q_empty, S_read;
  Shared<u64, 1, 2> dP_read, dS_full, dS_empty, may_add, added, announced;   // the last three: turns
  Shared<u64, 1, n_dO> dO_landed, dO_full, dO_empty;
};
static_assert(smem_bytes < 0 || sizeof(Smem) == smem_bytes,
              "bwd_07_cluster: Smem and its row in cuflash/rows_hopper_backward.py disagree");
static_assert(args_bytes < 0 || sizeof(MappedArgs) == args_bytes, "bwd_07_cluster: Args and launch.py disagree");

// Rings: the n-th use of a stage.
template <int n_slots> DEVICE u32 at(Shared<u64, 1, n_slots>& ring, u32 n) { return ring.address(0, n % n_slots); }
template <int n_slots> DEVICE void wait_full(Shared<u64, 1, n_slots>& ring, u32 n) {
  mbarrier_wait(at(ring, n), n / n_slots & 1);
}
template <int n_slots> DEVICE void wait_empty(Shared<u64, 1, n_slots>& ring, u32 n) {
  mbarrier_wait(at(ring, n), (n / n_slots & 1) ^ 1);
}
template <int n_slots> DEVICE void arrive_at_both(Shared<u64, 1, n_slots>& ring, u32 n) {
  mbarrier_arrive(at(ring, n));
  mbarrier_arrive_remote(at(ring, n), cluster_rank() ^ 1);
}

// What the block owns.
struct Owner {
  KeyTile tile;       // the cluster's
  int rank;           // of the block
  i32 j0;             // the block's first key
  i32 h_begin, h_end; // query heads
};

// Asked for again at the end, because that is cheaper than to keep it (the compiler must not know: opaque).
DEVICE Owner owner_of(const Args& args) {
  Owner own;
  i64 x = opaque(static_cast<int>(blockIdx.x)) / 2, part = 0, slot;
  const i64 group = args.heads / args.heads_k;
  if constexpr (is_split) {
    const i64 n_clusters = n_slots(args, args.len_k, tile_kv) * args.heads_k;
    part = x / n_clusters;
    x %= n_clusters;
  }
  own.tile = key_tile_along(args, x, slot);
  constexpr i64 n_parts = is_split ? n_splits : 1;
  own.h_begin = static_cast<i32>(own.tile.h * group + part * group / n_parts);
  own.h_end = static_cast<i32>(own.tile.h * group + (part + 1) * group / n_parts);
  own.rank = static_cast<int>(cluster_rank());
  own.j0 = own.tile.j0 + own_keys * own.rank;
  return own;
}

// Barriers by number.
constexpr int GRADIENTS = 1, KEYS_ARE_CLEAN = 2;
DEVICE int P_full(u32 n) { return 3 + n % n_P; }    // group 1 arrives, group 2 waits
DEVICE int P_empty(u32 n) { return 5 + n % n_P; }   // the reverse

// ---- group 0

// Tiles of queries, from i0 in [begin, end), of which every pair with the block's keys is visible.
DEVICE Range whole_tiles(const Args& args, const Sequence& seq, i32 j0) {
  if (masks_every_tile || asks_blocks) return {0, 0};
  // With j the bounds of its queries move one way: the last key has the latest begin, the first the earliest end.
  const Range first = visible_queries(args, seq, j0, j0);
  const Range last = visible_queries(args, seq, j0 + own_keys - 1, j0 + own_keys - 1);
  return {last.begin, smallest(first.end, last.end) - tile_q + 1};
}

// The block's half of the rows of a tile, into both blocks.
template <class Tile>
DEVICE void load_half(Tile& tile, const TensorMap& map, u32 full, int rank, int row, int head, int batch) {
  const u32 first = opaque(static_cast<int>(tile.cells.address(rank * (tile_q / 2), 0)));   // registers
#pragma unroll
  for (int p = 0; p < Tile::n_panels; ++p)
    tma_load_multicast(first + p * Tile::panel_bytes, map, full, tma_at(64 * p, row, head, batch), 3);
}

// K, V and the peer's K, by one thread.
DEVICE void load_keys(const MappedArgs& args, Smem& smem, const Owner& own) {
  const int row = static_cast<int>(own.tile.seq.k_row0) + own.j0, row_peer = row + own_keys * (1 - 2 * own.rank);
  const int head = static_cast<int>(own.tile.h), batch = static_cast<int>(own.tile.seq.array_b);
  const u32 K_full = at(smem.K_full, 0), V_full = at(smem.V_full, 0);
  mbarrier_arrive_expect(K_full, smem.K.n_bytes);
  smem.K.load(args.maps.K, K_full, row, head, batch);
  mbarrier_arrive_expect(V_full, smem.V.n_bytes + smem.K_peer.n_bytes);
  smem.V.load(args.maps.V, V_full, row, head, batch);
#pragma unroll
  for (int p = 0; p < peer_cols / 64; ++p)
    tma_load(smem.K_peer.cells.address(p * own_keys, 0), args.maps.K, V_full,
             tma_at(first_peer_col(own.rank) + 64 * p, row_peer, head, batch));
}

DEVICE QueryWalk<Walk> walk_of(const Args& args, const Owner& own, int lane) {
  const i32 j0 = own.tile.j0, j1 = smallest(j0 + tile_kv, own.tile.seq.len_k);
  const Range queries = j0 < j1 ? visible_queries(args, own.tile.seq, j0, j1 - 1) : Range{0, 0};
  return QueryWalk<Walk>(args, own.tile.seq, queries, j0, own.h_begin, own.h_end, lane);
}

// One warp.  Each block of the cluster loads 32 of the 64 rows of Q and dO, for both.
DEVICE void load_operands(const MappedArgs& args, Smem& smem, const Owner& own, int lane) {
  const Sequence& seq = own.tile.seq;
  const int batch = static_cast<int>(seq.array_b), rank = own.rank;
  auto& Q_landed = cleans_queries ? smem.Q_landed : smem.Q_full;
  auto& dO_landed = cleans_queries ? smem.dO_landed : smem.dO_full;
  const Range whole = whole_tiles(args, seq, own.j0);
  const Global<float> rows(args.workspace[SLOT_ROWS]);
  const Global<elem> dO_tiles(args.workspace[SLOT_DO]);
  QueryWalk<Walk> walk = walk_of(args, own, lane);
  if (!walk.exists() && lane == 0) {
    smem.steps.as<Step>(0, 0) = {};
    mbarrier_arrive(at(Q_landed, 0));   // a step that does not exist
  }
#pragma unroll 1
  for (u32 n = 0; walk.exists(); ++n) {
    const i32 i0 = walk.i0, head = walk.h;
    const i32 place = static_cast<i32>(place_of(args, seq, head, i0));
    const i64 first_row = static_cast<i64>(place) * 2 * tile_q;
    const int row = static_cast<int>(seq.q_row0) + i0 + rank * (tile_q / 2);
    wait_empty(smem.Q_empty, n);   // both blocks have used this stage of Q for S and dK
    wait_empty(smem.S_read, n);    // the weights group has read lse and the step
    smem.fill_blocks(walk.blocks, i0, lane, n % n_Q);
    walk.next();
    const bool tests = i0 < whole.begin || i0 >= whole.end;
    warp_sync();   // the kept blocks are written
    if (lane == 0) {
      const u32 full = at(Q_landed, n);
      const u32 flags = 1 | (walk.exists() ? 0 : 2) | (tests ? 4 : 0);
      smem.steps.as<Step>(n % n_steps, 0) = {i0, head, flags, place};
      mbarrier_arrive_expect(full, smem.Q[0][0].n_bytes + 4 * tile_q);
      load_half(smem.Q[n % n_Q][0], args.maps.Q, full, rank, row, head, batch);
      bulk_load(smem.lse.address(n % n_Q, 0), rows.address(first_row, 4 * tile_q), 4 * tile_q, full);
    }
    wait_empty(smem.dO_empty, n);   // both blocks have used this stage of dO for dP and dV
    wait_empty(smem.dP_read, n);    // the gradients group has read delta
    if (lane == 0) {
      const u32 full = at(dO_landed, n);
      mbarrier_arrive_expect(full, dO_parts * smem.dO[0][0].n_bytes + 4 * tile_q);
      if constexpr (converts_dO)
#pragma unroll
        for (int part = 0; part < dO_parts; ++part) {
          const i64 first = (part * all_places(args) + place) * (tile_q * head_dim_v_tile);
          constexpr u32 n_bytes = 2 * tile_q * head_dim_v_tile;
          bulk_load(smem.dO[0][part].address(), dO_tiles.address(first, n_bytes), n_bytes, full);
        }
      else load_half(smem.dO[n % n_dO][0], args.maps.dO, full, rank, row, head, batch);
      bulk_load(smem.delta.address(n % 2, 0), rows.address(first_row + tile_q, 4 * tile_q), 4 * tile_q,
                full);
    }
  }
}

// One warp: rows of Q and dO that do not exist become zeros before anybody sees them.
DEVICE void clean_queries(Smem& smem, const Sequence& seq, int lane) {
  bool is_last = false;
#pragma unroll 1
  for (u32 n = 0; !is_last; ++n) {
    wait_full(smem.Q_landed, n);
    const Step step = smem.steps.as<Step>(n % n_steps, 0);
    const bool ends = step.exists() && step.i0 + tile_q > seq.len_q;
    is_last = step.is_last() || !step.exists();
    if (ends) smem.Q[n % n_Q][0].clear_rows(seq.len_q - step.i0, lane, 32);
    fence_async_shared();
    warp_sync();   // the rows are zeros, also to wgmma
    if (lane == 0) mbarrier_arrive(at(smem.Q_full, n));
    if (!step.exists()) return;
    wait_full(smem.dO_landed, n);
    if (ends)
      for (int part = 0; part < dO_parts; ++part)
        smem.dO[n % n_dO][part].clear_rows(seq.len_q - step.i0, lane, 32);
    fence_async_shared();
    warp_sync();   // as above
    if (lane == 0) mbarrier_arrive(at(smem.dO_full, n));
  }
}

// ---- turns: deterministic clusters add to the dQ of a tile of queries one after the other

// One warp waits for the turns, so that no product does; it is at most two tiles ahead of what is announced.
DEVICE void wait_for_turns(const Args& args, Smem& smem, const Owner& own, int lane) {
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  QueryWalk<Walk> walk = walk_of(args, own, lane);
#pragma unroll 1
  for (u32 n = 0; walk.exists(); walk.next(), ++n) {
    if (lane == 0) {
      wait_empty(smem.announced, n);
      const i64 place = place_of(args, own.tile.seq, walk.h, walk.i0);
      turns.wait_for(2 * place + own.rank, turn_of(args, own.tile.seq, walk.i0, own.tile.j0));
      mbarrier_arrive(at(smem.may_add, n));
    }
    warp_sync();   // the walk is everybody's
  }
}
// Another says that both groups have added.
DEVICE void announce_turns(const Args& args, Smem& smem, const Owner& own, int lane) {
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  QueryWalk<Walk> walk = walk_of(args, own, lane);
#pragma unroll 1
  for (u32 n = 0; walk.exists(); walk.next(), ++n) {
    if (lane == 0) {
      wait_full(smem.added, n);
      turns.add_release(2 * place_of(args, own.tile.seq, walk.h, walk.i0) + own.rank, 1);
      mbarrier_arrive(at(smem.announced, n));
    }
    warp_sync();   // the walk is everybody's
  }
}

// ---- what groups 1 and 2 have in common

// A descriptor that the compiler cannot keep from one step to the next: there are too many for that.
struct Descriptor {
  u32 low, high;
  DEVICE explicit Descriptor(u64 first)
      : low(opaque(static_cast<int>(first))), high(static_cast<u32>(first >> 32)) {}
  DEVICE u64 at(u32 step) const { return static_cast<u64>(high) << 32 | (low + step); }   // step: 16 bytes
};
// 64 keys x n columns += A^T B: A packed in registers, B the 64 rows of a tile.
template <int n, class Tile> DEVICE void add_product(float (&sum)[n], const Words& A, Tile& B) {
  const Descriptor rows(B.descriptor_MN(0));
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<elem, 1>(sum, A[k], rows.at(k * Tile::line_bytes), true);
  wgmma_commit();
}
// 64 keys x 64 queries = A B^T over the columns of both; B a sum of parts.  A's first steps from registers.
template <int steps, int parts, class Tile>
DEVICE void product(float (&result)[n_scores], Tile& A, const u32 (&held)[steps][4], int n_held, Tile (&B)[parts]) {
  const Descriptor keys(A.descriptor_K(0)), queries(B[0].descriptor_K(0));
  if constexpr (!is_plain)   // else what branches left of the last result gets in the way of this one (C7514)
#pragma unroll
    for (int at = 0; at < n_scores; ++at) result[at] = 0;
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < parts; ++part)
#pragma unroll
    for (int k = 0; k < Tile::cols / 16; ++k) {
      const u32 step = (k / 4 * Tile::panel_bytes + k % 4 * 32) / 16;
      const u64 other = queries.at(part * Tile::n_bytes / 16 + step);
      if (k < n_held) wgmma<elem>(result, held[k < steps ? k : 0], other, part + k > 0);
      else wgmma<elem>(result, keys.at(step), other, part + k > 0);
    }
  wgmma_commit();
}

// The first steps of a tile as product takes them, the warp's 16 rows.
template <int steps, class Tile> DEVICE void hold(u32 (&held)[steps][4], int n_held, Tile& tile, int thread) {
#pragma unroll
  for (int k = 0; k < steps; ++k)
    if (k < n_held) ldmatrix_x4(held[k], tile.address(thread / 32 * 16 + thread % 16, 2 * k + thread % 32 / 16));
}

// Columns [first_col, + 2 n) of dQ: what they are made of, and where they go.
struct DqShare {
  const Args& args;
  Smem& smem;
  i32 step, step_peer;   // from K's descriptor, K_peer's, to that of the columns: 16 bytes
  i32 first;             // dQ_index of this lane's first numbers in place 0

  DEVICE DqShare(const Args& args, Smem& smem, const Owner& own, int first_col, int thread)
      : args(args), smem(smem) {
    const int peer_col = first_col - first_peer_col(own.rank);
    step = (first_col / 64 * smem.K.panel_bytes + first_col % 64 * 2) / 16;
    step_peer = (peer_col / 64 * smem.K_peer.panel_bytes + peer_col % 64 * 2) / 16;
    first = static_cast<i32>(dQ_index(0, thread / 32, first_col / 8, thread % 32));
  }
  // dQ = dS K of the n-th step, over the keys of both blocks.
  template <int size> DEVICE void start(float (&dQ)[size], u32 n) {
    wait_full(smem.dS_full, n);   // dS of own keys is stored, that of the peer's has landed
    const Descriptor dS(smem.dS[n % 2][0].descriptor_MN(0));   // the peer's follows: 8 more k16 steps
    const Descriptor K(smem.K.descriptor(step, smem.K.panel_bytes));
    const Descriptor K_peer(smem.K_peer.descriptor(step_peer, smem.K_peer.panel_bytes));
    constexpr u32 k16 = 128;   // 16 rows of a panel, in 16 bytes
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma<elem, 1, 1>(dQ, dS.at(k * k16), k < 4 ? K.at(k * k16) : K_peer.at((k - 4) * k16), k > 0);
    wgmma_commit();
  }
  // The sums += dQ of the n-th step.
  template <int size> DEVICE void add(const float (&dQ)[size], u32 n) {
    const Global<float> sums(args.workspace[SLOT_DQ]);
    const i64 place = smem.steps.as<Step>(n % n_steps, 0).place;
    const i64 index = place * (tile_q * head_dim_tile) + first;
    if constexpr (deterministic) wait_full(smem.may_add, n);   // it is the cluster's turn
#pragma unroll
    for (int c = 0; c < size / 4; ++c)
      sums.add_as(index + c * 128, Vec16<float>{{dQ[4 * c], dQ[4 * c + 1], dQ[4 * c + 2], dQ[4 * c + 3]}});
    if constexpr (deterministic) {
      warp_sync();   // the warp has added
      if (first / 4 % 32 == 0) mbarrier_arrive(at(smem.added, n));
    }
  }
};

// target = sum * factor, the rows of the block's keys; or total += sum, where clusters share them.
template <int n>
DEVICE void store_keys(const Args& args, const float (&sum)[n], float factor, const Tensor& target,
                       const Tensor& total, i64 dim, int thread) {
  const Owner own = owner_of(args);
  const Sequence& seq = own.tile.seq;
  const int row0 = thread / 32 * 16, lane = thread % 32;
  const auto rows_of = [&](const Tensor& tensor, i32 end) {
    return tile_source(tensor, seq.array_b, seq.k_row0, own.tile.h, own.j0, end, 0, dim);
  };
  if constexpr (is_split) {
    const TileSource rows = rows_of(total, seq.len_k);
#pragma unroll
    for (int at = 0; at < n; ++at) {   // one by one: exchanges between lanes would serialise the products (C7514)
      const int row = row0 + lane / 4 + at / 2 % 2 * 8, d = at / 4 * 8 + lane % 4 * 2 + at % 2;
      if (row < rows.rows && d < rows.cols) Global<float>(total.data).add(rows.base + row * rows.stride + d, sum[at]);
    }
  } else store_rows<out_elem>(sum, factor, target.data, rows_of(target, seq.rows_k), row0, seq.len_k - own.j0, lane);
}

// 32 numbers of a thread through smem.P, from 16-byte row `first` on.
DEVICE void give(Smem& smem, const float (&x)[n_scores], int first, int thread) {
#pragma unroll
  for (int c = 0; c < 8; ++c)
    smem.P.as<Vec16<float>>((first + c) * 128 + thread, 0) = {{x[4 * c], x[4 * c + 1], x[4 * c + 2], x[4 * c + 3]}};
}
DEVICE void take(Smem& smem, float (&x)[n_scores], int first, int thread) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const Vec16<float> four = smem.P.as<Vec16<float>>((first + c) * 128 + thread, 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) x[4 * c + e] = four.item[e];
  }
}

// ---- group 1: P and dV

struct WeightsGroup {
  const MappedArgs& args;
  Smem& smem;
  const Owner& own;
  const int thread, lane;
  const i32 j;                // the lane's keys: j, j + 8
  const Walk blocks;          // says where the cluster's blocks of keys begin
  DqShare share;
  Step step;                  // of the newest S
  float dV[head_dim_v_tile / 2], dQ[weights_cols / 2];
  u32 K[held_K + 1][4];
  Words P;                    // the A operand of dV

  DEVICE WeightsGroup(const MappedArgs& args, Smem& smem, const Owner& own, int thread)
      : args(args), smem(smem), own(own), thread(thread), lane(thread % 32),
        j(own.j0 + thread / 32 * 16 + thread % 32 / 4),
        blocks(args.blocks_of_key, 0, 0, own.tile.j0, own.tile.j0, 0, thread % 32),
        share(args, smem, own, first_weights_col(own.rank), thread) {}

  DEVICE void run() {
#pragma unroll
    for (int d = 0; d < head_dim_v_tile / 2; ++d) dV[d] = 0;
    u32 n = 0;
    hold(K, held_K, smem.K, thread);
    read_step(0);
    if (step.exists()) {
      float S[n_scores];
      product(S, smem.K, K, held_K, smem.Q[0]);
      wgmma_wait<0>();   // S
      make_P(S, 0);
      wait_full(smem.V_full, 0);   // K_peer
      if (!step.is_last()) go_on<true>(n++);
#pragma unroll 1
      while (!step.is_last()) go_on<false>(n++);
      finish(n);
    }
    store_keys(args, dV, 1, args.dV, args.dV_sum, args.head_dim_v, thread);
    if (step.exists()) {   // the other group's last dS was made meanwhile
      share.start(dQ, n);
      wgmma_wait<0>();   // dQ
      share.add(dQ, n);
      // The other group's last arrivals, which nobody has waited for.
      if (n + 1 >= n_P) barrier_sync(P_empty(n + 1), 256);
      if (n_P == 2) barrier_sync(P_empty(n), 256);
    }
  }

  DEVICE void read_step(u32 n) {
    wait_full(smem.Q_full, n);   // Q, lse and the step are there
    step = smem.steps.as<Step>(n % n_steps, 0);
  }

  // S -> P of the newest step: packed for dV, and for the other group.
  DEVICE void make_P(float (&S)[n_scores], u32 n) {
    float slopes[n_scores];
    const HeadRules rules = head_rules_of(args, own.tile.seq, step.h);
    const auto is_kept = [&](i32 i, i32 key) { return smem.keeps(blocks, key, step.i0, i, n % n_Q); };
    if (step.tests()) {   // made here, because few steps need them: registers
      const Range queries[2] = {visible_queries(args, own.tile.seq, j, j),
                                visible_queries(args, own.tile.seq, j + 8, j + 8)};
      make_weights<true>(args, rules, S, slopes, smem.lse, n % n_Q, step.i0, j, queries, lane, is_kept);
    } else make_weights<false>(args, rules, S, slopes, smem.lse, n % n_Q, step.i0, j, {}, lane, is_kept);
    if (thread == 0) arrive_at_both(smem.Q_empty, n);   // S is complete
    if (n >= n_P) barrier_sync(P_empty(n), 256);   // the other group has read what this overwrites
    if constexpr (is_exact) {
      give(smem, S, 0, thread);
      if constexpr (has_softcap) give(smem, slopes, 8, thread);
      KeptWeights kept = {};
      if constexpr (has_dropout) kept = kept_weights_of(rules.dropout, step.i0, j, lane);
      pack_weights(args, P, S, kept);
    } else {
      pack_scores(P, S);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        smem.P.as<Vec16<u32>>((n % 2 * 4 + k) * 128 + thread, 0) = {{P[k][0], P[k][1], P[k][2], P[k][3]}};
    }
    barrier_arrive(P_full(n), 256);   // P is written
    warp_sync();                      // the warp has read lse and the step
    if (lane == 0) mbarrier_arrive(at(smem.S_read, n));
  }

  // Step n, whose P is made, and S and P of the next.
  template <bool is_first> DEVICE void go_on(u32 n) {
    wait_full(smem.dO_full, n);
    add_product(dV, P, smem.dO[n % n_dO][0]);
    if (!is_exact && !is_first && n > 1) share.add(dQ, n - 2);
    read_step(n + 1);
    float S[n_scores];   // new in every step: the compiler need not carry it from one to the next
    product(S, smem.K, K, held_K, smem.Q[(n + 1) % n_Q]);
    wgmma_wait<1>();   // dV has read dO and P
    if (thread == 0) arrive_at_both(smem.dO_empty, n);
    if constexpr (is_first) {
      wgmma_wait<0>();   // S
    } else {
      share.start(dQ, n - 1);
      wgmma_wait<1>();   // S
      if constexpr (is_exact) {   // registers
        wgmma_wait<0>();   // dQ has read dS
        if (thread == 0) arrive_at_both(smem.dS_empty, n - 1);
        share.add(dQ, n - 1);
      }
    }
    make_P(S, n + 1);
    wgmma_wait<0>();   // dQ has read dS
    if (!is_exact && !is_first && thread == 0) arrive_at_both(smem.dS_empty, n - 1);
  }

  // Step n, the last, but for its dQ.
  DEVICE void finish(u32 n) {
    wait_full(smem.dO_full, n);
    add_product(dV, P, smem.dO[n % n_dO][0]);
    if (!is_exact && n > 1) share.add(dQ, n - 2);
    wgmma_wait<0>();   // dV
    if (n > 0) {
      share.start(dQ, n - 1);
      wgmma_wait<0>();   // dQ
      share.add(dQ, n - 1);
    }
  }
};

// ---- group 2: dS and dK

struct GradientsGroup {
  const MappedArgs& args;
  Smem& smem;
  const Owner& own;
  const int thread, lane;
  const i32 j;                // the lane's keys: j, j + 8
  DqShare share;
  Step step;                  // of the newest dP
  HeadRules rules = {};
  i32 rules_h = -1;           // whose they are
  OptionSums sums = {};
  float dK[head_dim_tile / 2], dP[n_scores], dQ[gradients_cols / 2];
  u32 V[held_V + 1][4];
  Words dS;                   // the A operand of dK

  DEVICE GradientsGroup(const MappedArgs& args, Smem& smem, const Owner& own, int thread)
      : args(args), smem(smem), own(own), thread(thread), lane(thread % 32),
        j(own.j0 + thread / 32 * 16 + thread % 32 / 4), share(args, smem, own, first_gradients_col(own.rank), thread) {}

  DEVICE void run() {
#pragma unroll
    for (int d = 0; d < head_dim_tile / 2; ++d) dK[d] = 0;
    wait_full(smem.V_full, 0);   // V, K_peer
    hold(V, held_V, smem.V, thread);
    read_step(0);
    if (step.exists()) {
      wait_full(smem.dO_full, 0);
      product(dP, smem.V, V, held_V, smem.dO[0]);
      wgmma_wait<0>();   // dP
      u32 n = 0;
      if (!step.is_last()) go_on<true>(n++);
#pragma unroll 1
      while (!step.is_last()) go_on<false>(n++);
      finish(n);
      if constexpr (is_exact) leave_head();
    }
    store_keys(args, dK, static_cast<float>(args.scale), args.dK, args.dK_sum, args.head_dim, thread);
  }

  DEVICE void read_step(u32 n) {
    wait_full(smem.Q_full, n);   // the step is there, and Q
    step = smem.steps.as<Step>(n % n_steps, 0);
  }

  DEVICE void differentiate(u32 n) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const Pack<float, 2> delta = smem.delta.as<Pack<float, 2>>(n % 2, 8 * c + lane % 4 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) dP[4 * c + e] -= delta.item[e % 2];
    }
    barrier_sync(P_full(n), 256);   // the other group has written P
    const bool hides = has_bias || step.tests();   // a weight of 0 may meet NaN
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const Vec16<u32> packed = smem.P.as<Vec16<u32>>((n % 2 * 4 + k) * 128 + thread, 0);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int at = 4 * k + r;
        const float low = low_of<elem>(packed.item[r]), high = high_of<elem>(packed.item[r]);
        dS[k][r] = pack<elem>(hides && low == 0 ? 0.f : low * dP[2 * at],
                              hides && high == 0 ? 0.f : high * dP[2 * at + 1]);
      }
    }
  }
  // The same from exact weights, with what options want.
  DEVICE void differentiate_exactly(u32 n) {
    const Sequence& seq = own.tile.seq;
    if (step.h != rules_h) leave_head();
    rules_h = step.h;
    rules = head_rules_of(args, seq, step.h);
    KeptWeights kept = {};
    if constexpr (has_dropout) kept = kept_weights_of(rules.dropout, step.i0, j, lane);
    float weights[n_scores], slopes[n_scores];
    barrier_sync(P_full(n), 256);   // the other group has written P
    take(smem, weights, 0, thread);
    if constexpr (has_softcap) take(smem, slopes, 8, thread);
    const int row = n % 2;
    if (step.tests()) {
      const Range queries[2] = {visible_queries(args, seq, j, j), visible_queries(args, seq, j + 8, j + 8)};
      make_gradients<true>(args, rules, dP, weights, dS, slopes, kept, smem.delta, row, step.i0, j, queries, sums,
                           lane);
    } else {
      make_gradients<false>(args, rules, dP, weights, dS, slopes, kept, smem.delta, row, step.i0, j, {}, sums,
                            lane);
    }
    pack_scores(dS, dP);
  }

  // The sums of a head's queries -> memory.
  DEVICE void leave_head() {
    const Sequence& seq = own.tile.seq;
    if (rules_h < 0) return;
    if constexpr (dbias_case == 2)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = warp_sum<4>(sums.columns[half]);
        const i32 key = j + 8 * half;
        if (lane % 4 == 0 && key < seq.rows_k)
          Global<acc>(args.workspace[SLOT_DBIAS])
              .store((seq.array_b * args.heads + rules_h) * args.len_k + seq.k_row0 + key, total);
      }
    if constexpr (wants_dalibi) {
      const float mine = warp_sum(sums.slope);
      if (lane == 0) smem.sums(0, thread / 32) = mine;
      barrier_sync(GRADIENTS, 128);   // all warps of the group have written
      const i64 tile = own.j0 / own_keys;   // pass_dalibi counts the blocks' tiles
      const i64 slot = is_packed ? seq.k_row0 / own_keys + seq.b + tile : tile * args.batch + seq.b;
      if (thread == 0 && own.j0 < seq.rows_k)
        Global<acc>(args.workspace[SLOT_DALIBI])
            .store(slot * args.heads + rules_h,
                   smem.sums(0, 0) + smem.sums(0, 1) + smem.sums(0, 2) + smem.sums(0, 3));
      barrier_sync(GRADIENTS, 128);   // the sums are read
    }
    sums = {};
  }

  // dP -> dS of step n, packed for dK, stored here and in the peer for dQ.
  DEVICE void make_dS(u32 n) {
    if (thread == 0) arrive_at_both(smem.dO_empty, n);   // dP is complete
    if constexpr (is_exact) differentiate_exactly(n);
    else differentiate(n);
    barrier_arrive(P_empty(n), 256);   // P is read
    warp_sync();                       // the warp has read delta
    if (lane == 0) mbarrier_arrive(at(smem.dP_read, n));
    wait_empty(smem.dS_empty, n);   // dQ of step n - 2 is complete in both blocks
    PanelTile<own_keys, tile_q>& mine = smem.dS[n % 2][0];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      stmatrix_x4(mine.address(thread / 32 * 16 + lane % 16, 2 * k + lane / 16), dS[k]);
    fence_async_shared();
    barrier_sync(GRADIENTS, 128);   // the group's dS is stored, also for wgmma and the copy
    if (thread == 0) {
      const u32 peer = 1 - own.rank;
      mbarrier_arrive_expect(at(smem.dS_full, n), mine.n_bytes);
      bulk_to_peer(cluster_address(smem.dS[n % 2][1].address(), peer), mine.address(), mine.n_bytes,
                   cluster_address(at(smem.dS_full, n), peer));
    }
  }

  // Step n, whose dP is complete, and dP of the next.
  template <bool is_first> DEVICE void go_on(u32 n) {
    make_dS(n);
    add_product(dK, dS, smem.Q[n % n_Q][0]);
    if (!is_exact && !is_first && n > 1) share.add(dQ, n - 2);
    if constexpr (is_first) {
      wgmma_wait<0>();   // dK has read Q and dS
    } else {
      share.start(dQ, n - 1);
      wgmma_wait<1>();   // dK has read Q and dS
    }
    if (thread == 0) arrive_at_both(smem.Q_empty, n);
    wait_full(smem.dO_full, n + 1);
    float next[n_scores];
    product(next, smem.V, V, held_V, smem.dO[(n + 1) % n_dO]);
    read_step(n + 1);
    if constexpr (!is_first) {
      wgmma_wait<1>();   // dQ has read dS
      if (thread == 0) arrive_at_both(smem.dS_empty, n - 1);
    }
    wgmma_wait<0>();   // dP
#pragma unroll
    for (int at = 0; at < n_scores; ++at) dP[at] = next[at];
    if constexpr (is_exact && !is_first) share.add(dQ, n - 1);   // registers
  }

  // Step n, the last.
  DEVICE void finish(u32 n) {
    make_dS(n);
    add_product(dK, dS, smem.Q[n % n_Q][0]);
    wgmma_wait<0>();   // dK
    if (!is_exact && n > 1) share.add(dQ, n - 2);
    if (n > 0) {
      share.start(dQ, n - 1);
      wgmma_wait<0>();   // dQ
      share.add(dQ, n - 1);
    }
    share.start(dQ, n);
    wgmma_wait<0>();   // dQ
    share.add(dQ, n);
  }
};

// ---- the kernel

template <int n_slots> DEVICE void init(Shared<u64, 1, n_slots>& ring, u32 count) {
#pragma unroll
  for (u32 n = 0; n < n_slots; ++n) mbarrier_init(at(ring, n), count);
}
DEVICE void init_barriers(Smem& smem) {
  init(smem.K_full, 1);
  init(smem.V_full, 1);
  init(smem.Q_landed, 1);
  init(smem.Q_full, 1);
  init(smem.Q_empty, 4);   // two groups in two blocks
  init(smem.S_read, 4);    // warps
  init(smem.dP_read, 4);   // warps
  init(smem.dO_landed, 1);
  init(smem.dO_full, 1);
  init(smem.dO_empty, 4);   // groups
  init(smem.dS_full, 1);
  init(smem.dS_empty, 4);   // groups
  init(smem.may_add, 1);
  init(smem.added, 8);   // warps
  init(smem.announced, 1);
  mbarrier_init_fence();
}

CLUSTER_KERNEL(n_threads, 1, 2, bwd_07_cluster)(const __grid_constant__ MappedArgs args) {
  SHARED_MEMORY(Smem, smem);
  const int group = shfl(static_cast<int>(threadIdx.x) / 128, 0), thread = threadIdx.x % 128;
  const Owner own = owner_of(args);
  if (!own.tile.exists) return;   // both blocks of the cluster
  if (threadIdx.x == 0) {
    init_barriers(smem);
    load_keys(args, smem, own);
  }
  cluster_sync();   // the barriers are ready, here and in the peer

  if (group == 0) {
    registers_shrink<24>();
    if (thread < 32) load_operands(args, smem, own, thread);
    else if (cleans_queries && thread < 64) clean_queries(smem, own.tile.seq, thread - 32);
    else if (deterministic && thread / 32 == 2) wait_for_turns(args, smem, own, thread - 64);
    else if (deterministic && thread / 32 == 3) announce_turns(args, smem, own, thread - 96);
  } else {
    registers_grow<240>();
    wait_full(smem.K_full, 0);
    if constexpr (cleans_keys) {
      wait_full(smem.V_full, 0);
      const i32 end = own.tile.seq.len_k;
      const auto rows = [&](i32 j0) { return clamp(end - j0, 0, own_keys); };
      smem.K.clear_rows(rows(own.j0), threadIdx.x - 128, 256);
      smem.K_peer.clear_rows(rows(own.tile.j0 + own_keys * (1 - own.rank)), threadIdx.x - 128, 256);
      fence_async_shared();
      barrier_sync(KEYS_ARE_CLEAN, 256);   // keys that do not exist are zeros, also to wgmma
    }
    if (group == 1) WeightsGroup(args, smem, own, thread).run();
    else GradientsGroup(args, smem, own, thread).run();
  }
  cluster_sync();   // nobody reaches into a block that has left
}
