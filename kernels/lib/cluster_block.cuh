// cluster_block.cuh - a block of bwd_07_cluster: what it owns and shares with its peer, barriers.   sm_90a
#pragma once
#include "cluster.cuh"
#include "key_rows.cuh"
#include "maps.cuh"
#include "mbarrier.cuh"
#include "panels.cuh"
#include "query_tiles.cuh"

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
// Where dS needs more of P than its 16 bits, P travels as float, alone in its buffer; softcap's slopes beside
// it.
constexpr bool is_exact = keeps_weights;
constexpr int n_P = is_exact ? 1 : 2, n_Q = has_softcap || asks_blocks ? 1 : 2;
// k16 steps of K and V, the first operands of S and dP, that stay in registers where there is room: shared
// memory is as busy as the tensor cores.
constexpr bool has_room = head_dim_tile <= 192 && head_dim_v_tile <= 192 && !is_exact && is_plain;
constexpr int held_K = has_room ? 4 : 0, held_V = has_room ? head_dim_v_tile / 16 : 0;
// dO of another dtype is a sum of parts, which take turns in one stage, the first last: use (n, part) of it.
constexpr int n_dO = converts_dO ? 1 : n_stages;
DEVICE u32 dO_use(u32 n, int part = 0) { return n * dO_parts + dO_parts - 1 - part; }
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
  DEVICE bool tests() const { return flags & 4; }       // some pair may be hidden
  DEVICE bool is_second() const { return flags & 8; }   // of its tile of keys, or later
  DEVICE bool is_third() const { return flags & 16; }   // or later
  DEVICE u32 key_tile() const { return flags >> 5; }    // tiles of keys that the cluster has walked before
};

// dQ of a step is added two steps later: what the loader told is kept until both groups have passed that.
constexpr int n_steps = 8;
// Rank 0 is at most n_Q steps, so tiles, ahead of rank 1.
constexpr int n_told = 4;

struct Smem : KeptBlocks<Walk, asks_blocks, 2> {
  PanelTile<own_keys, head_dim_tile> K;
  PanelTile<own_keys, head_dim_v_tile> V;
  PanelTile<own_keys, peer_cols> K_peer;
  PanelTile<tile_q, head_dim_tile> Q[n_Q];
  PanelTile<tile_q, head_dim_v_tile> dO[n_dO];
  PanelTile<own_keys, tile_q> dS[2][2];   // transposed; [1]: of the peer's keys
  Shared<u32, 8 * 128 * (has_softcap ? 2 : 1), 4> P;   // thread by thread, 16 bytes at a time
  Shared<float, n_Q, tile_q> lse;
  Shared<float, 2, tile_q> delta;
  Shared<i32, n_steps, 4> steps;
  Shared<u32, 1, n_steps> tiles;   // of keys: its number, beside each step
  Shared<i32, n_told, 4> told;     // rank 1: the next one's
  Shared<float, 1, 4> sums;   // of dalibi_slopes, a number per warp
  Shared<u64, 1, 1> K_full, V_full, keys_clean, keys_empty, asked;   // V_full: of V and K_peer
  Shared<u64, 1, n_told> is_told;
  Shared<u64, 1, n_steps> step_told;   // deterministic
  Shared<u64, 1, n_Q> Q_landed, Q_full, Q_empty, S_read;
  Shared<u64, 1, 2> dP_read, dS_full, dS_empty, may_add, added, announced;   // the last three: turns
  Shared<u64, 1, n_P> P_full, P_empty;
  Shared<u64, 1, n_dO> dO_landed, dO_full, dO_empty;
};
// Rings: the n-th use of a stage.
template <int n_slots> DEVICE u32 at(Shared<u64, 1, n_slots>& ring, u32 n) {
  return ring.address(0, n % n_slots);
}
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
  KeyTile tile;         // the cluster's
  int rank;             // of the block
  i32 j0;               // the block's first key
  i32 h_begin, h_end;   // query heads
};

// In turn, blocks take the one tile of their number: who waits for another may not have to take its place.
constexpr bool stays = !deterministic;
constexpr u32 NO_KEYS = 0x7fffffff;
DEVICE u32 tiles_of_a_part(const Args& args) {
  return static_cast<u32>(n_slots(args, args.len_k, tile_kv)) * static_cast<u32>(args.heads_k);
}

// The owner of tile number n.  Asked for again at the end, because that is cheaper than to keep it (the
// compiler must not know: opaque).
DEVICE Owner owner_of(const Args& args, u32 n) {
  Owner own;
  i64 slot;
  u32 x = opaque(static_cast<int>(n)), part = 0;   // as the grid once counted: 32 bits are enough
  const u32 group = static_cast<u32>(opaque(static_cast<int>(args.heads))) / static_cast<u32>(args.heads_k);
  if constexpr (is_split) {
    part = x / tiles_of_a_part(args);
    x %= tiles_of_a_part(args);
  }
  own.tile = key_tile_along(args, x, slot);
  constexpr u32 n_parts = is_split ? n_splits : 1;
  const u32 h = static_cast<u32>(own.tile.h) * group;
  own.h_begin = static_cast<i32>(h + part * group / n_parts);
  own.h_end = static_cast<i32>(h + (part + 1) * group / n_parts);
  own.rank = static_cast<int>(cluster_rank());
  own.j0 = own.tile.j0 + own_keys * own.rank;
  return own;
}

// Of keys, of the n-th step.
DEVICE u32 tile_of(Smem& smem, u32 n) { return stays ? shfl(smem.tiles(0, n % n_steps), 0) : blockIdx.x / 2; }

constexpr int GRADIENTS = 1;   // barrier by number

template <int n_slots> DEVICE void init(Shared<u64, 1, n_slots>& ring, u32 count) {
#pragma unroll
  for (u32 n = 0; n < n_slots; ++n) mbarrier_init(at(ring, n), count);
}
DEVICE void init_barriers(Smem& smem) {
  init(smem.K_full, 1);
  init(smem.V_full, 1);
  init(smem.keys_clean, 256);
  init(smem.keys_empty, 2);   // groups
  init(smem.is_told, 1);
  init(smem.asked, 32);
  init(smem.step_told, 1);
  init(smem.Q_landed, asks_blocks ? 32 : 1);
  init(smem.Q_full, cleans_queries || asks_blocks ? 32 : 1);
  init(smem.Q_empty, 4);   // two groups in two blocks
  init(smem.S_read, 128);
  init(smem.dP_read, 128);
  init(smem.P_full, 128);
  init(smem.P_empty, 128);
  init(smem.dO_landed, 1);
  init(smem.dO_full, cleans_queries ? 32 : 1);
  init(smem.dO_empty, 4);   // groups
  init(smem.dS_full, 1);
  init(smem.dS_empty, 4);   // groups
  init(smem.may_add, 1);
  init(smem.added, 8);   // warps
  init(smem.announced, 1);
  mbarrier_init_fence();
}
