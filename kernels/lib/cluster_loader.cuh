// cluster_loader.cuh - group 0 of bwd_07_cluster: loads, cleans, chooses tiles of keys, keeps turns.   sm_90a
#pragma once
#include "cluster_block.cuh"
#include "dependent.cuh"

// Tiles of queries, from i0 in [begin, end), of which every pair with the block's keys is visible.
DEVICE Range whole_tiles(const Args& args, const Sequence& seq, i32 j0) {
  if (masks_every_tile || asks_blocks) return {0, 0};
  // With j the bounds of its queries move one way: the last key has the latest begin, the first the earliest
  // end.
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
  const int row = static_cast<int>(own.tile.seq.k_row0) + own.j0;
  const int row_peer = row + own_keys * (1 - 2 * own.rank);
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

// Whether the first tile's keys are asked for at once: where some query sees them for sure.
DEVICE bool asks_early(const Args& args) {
  if (has_block_mask && stays) return false;
  const Owner own = owner_of(args, blockIdx.x / 2);
  const i32 j0 = own.tile.j0, j1 = smallest(j0 + tile_kv, own.tile.seq.len_k);
  if (!own.tile.exists || j0 >= j1) return false;
  const Range queries = visible_queries(args, own.tile.seq, j0, j1 - 1);
  return queries.begin < queries.end;
}

DEVICE QueryWalk<Walk> walk_of(const Args& args, const Owner& own, int lane) {
  const i32 j0 = own.tile.j0, j1 = smallest(j0 + tile_kv, own.tile.seq.len_k);
  const Range queries = j0 < j1 ? visible_queries(args, own.tile.seq, j0, j1 - 1) : Range{0, 0};
  return QueryWalk<Walk>(args, own.tile.seq, queries, j0, own.h_begin, own.h_end, lane);
}

// dK and dV of keys that no query sees, by one warp: zeros.
DEVICE void clear_keys(const Args& args, u32 tile, int lane) {
  if constexpr (is_split) return;   // nothing to add
  const auto clear = [&](const Tensor& target, i64 dim, int row) {
    const Owner own = owner_of(args, tile);   // again for every row: few registers, and few such tiles
    const Sequence& seq = own.tile.seq;
    const TileSource rows =
        tile_source(target, seq.array_b, seq.k_row0, own.tile.h, own.tile.j0 + row, seq.rows_k, 0, dim);
    if (rows.rows > 0)
#pragma unroll 1
      for (int d = lane; d < rows.cols; d += 32)
        Global<out_elem>(target.data).store(rows.base + d, convert<out_elem>(0.f));
  };
#pragma unroll 1
  for (int row = 0; row < tile_kv; ++row) {
    clear(args.dK, args.head_dim, row);
    clear(args.dV, args.head_dim_v, row);
  }
}

// One warp: chooses tiles of keys, and loads them.  Rank 0 asks a counter in memory and tells rank 1.
struct Chooser {
  const MappedArgs& args;
  Smem& smem;
  const int lane;

  DEVICE void run() {
    previous_kernel_wait();   // the counter is there
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      const u32 tile = choose(n);
      if (tile == NO_KEYS) break;
      if (n > 0 || !asks_early(args)) {
        if (lane == 0) {
          wait_empty(smem.keys_empty, n);   // both groups have used the tile before
          load_keys(args, smem, owner_of(args, tile));
        }
      }
      wait_full(smem.asked, n);   // not before: who takes a tile early keeps others from it
      warp_sync();   // a lane left behind could miss two phases
    }
  }
  // The n-th tile of the cluster that some query sees; the loader is told.
  DEVICE u32 choose(u32 n) {
    const Global<i32> counter(args.workspace[SLOT_ROWS]);
    u32 tile = blockIdx.x / 2;
    bool is_first = n == 0;   // both blocks know it
#pragma unroll 1
    for (;; is_first = false) {
      if (!is_first) {
        if (cluster_rank() == 1) return hear(n);
        const i32 taken = lane == 0 ? counter.fetch_add(counter_index(args), 1) : 0;
        tile = gridDim.x / 2 + static_cast<u32>(shfl(taken, 0));
        if (tile >= tiles_of_a_part(args) * (is_split ? n_splits : 1)) {
          tile = NO_KEYS;
          break;
        }
      }
      if (is_walked(tile)) break;
    }
    tell(static_cast<u32>(opaque(static_cast<int>(n))), tile, !is_first);
    return tile;
  }
  DEVICE void tell(u32 n, u32 tile, bool to_peer) {
    if (lane != 0) return;
    const u32 slot = n % n_told, here = smem.told.address(slot, 0);
    smem.told(slot, 0) = static_cast<i32>(tile);
    mbarrier_arrive(at(smem.is_told, n));
    if (!to_peer) return;
    fence_async_shared();   // the copy reads it
    bulk_to_peer(cluster_address(here, 1), here, 16, cluster_address(at(smem.is_told, n), 1));
  }
  DEVICE u32 hear(u32 n) {
    if (lane == 0) mbarrier_arrive_expect(at(smem.is_told, n), 16);
    wait_full(smem.is_told, n);   // the peer has told
    return static_cast<u32>(smem.told(n % n_told, 0));
  }
  // Rank 0 writes the zeros of a tile that is not.
  DEVICE bool is_walked(u32 tile) {
    const Owner own = owner_of(args, tile);
    if (!own.tile.exists) return false;
    if (walk_of(args, own, lane).exists()) return true;
    if (cluster_rank() == 0) clear_keys(args, tile, lane);
    return false;
  }
};

// One warp.  Each block of the cluster loads 32 of the 64 rows of Q and dO, for both.
struct Loader {
  const MappedArgs& args;
  Smem& smem;
  const int lane;
  u32 n;   // steps asked for

  DEVICE void run() {
    cluster_wait();           // the barriers of both blocks are ready
    previous_kernel_wait();   // rows, zeros and the counter are there
    next_kernel_may_start();
    if constexpr (stays) {
#pragma unroll 1
      for (u32 key_tile = 0;; ++key_tile) {
        wait_full(smem.is_told, key_tile);   // which tile is next
        const u32 tile = static_cast<u32>(smem.told(key_tile % n_told, 0));
        if (tile == NO_KEYS) break;
        load_tile(tile, key_tile);
        mbarrier_arrive(at(smem.asked, key_tile));   // its last step is asked for
      }
    } else {
      load_tile(blockIdx.x / 2, 0);
      if (n == 0 && cluster_rank() == 0 && owner_of(args, blockIdx.x / 2).tile.exists)
        clear_keys(args, blockIdx.x / 2, lane);
    }
    wait_empty(smem.Q_empty, n);   // as below
    wait_empty(smem.S_read, n);
    if (lane == 0) {
      smem.steps.as<Step>(n % n_steps, 0) = {};
      if constexpr (deterministic) mbarrier_arrive(at(smem.step_told, n));
    }
    if (lane == 0 || asks_blocks)   // a step that does not exist
      mbarrier_arrive(at(cleans_queries ? smem.Q_landed : smem.Q_full, n));
    // What the peer's groups say of the last stages has arrived: nothing reaches into a block that has left.
#pragma unroll
    for (u32 more = 1; more < n_Q; ++more) wait_empty(smem.Q_empty, n + more);
#pragma unroll
    for (u32 more = 0; more < n_dO; ++more) wait_empty(smem.dO_empty, n * dO_parts + more);
  }

  DEVICE void load_tile(u32 tile, u32 key_tile) {
    const Owner own = owner_of(args, tile);
    const Sequence& seq = own.tile.seq;
    const int batch = static_cast<int>(seq.array_b);
    auto& Q_landed = cleans_queries ? smem.Q_landed : smem.Q_full;
    auto& dO_landed = cleans_queries ? smem.dO_landed : smem.dO_full;
    const int rank = own.rank;
    const Range whole = whole_tiles(args, seq, own.j0);
    const Global<float> rows(args.workspace[SLOT_ROWS]);
    const Global<elem> dO_tiles(args.workspace[SLOT_DO]);
    QueryWalk<Walk> walk = walk_of(args, own, lane);
    u32 told = key_tile << 5;   // and whether the step is the second, the third
#pragma unroll 1
    for (; walk.exists(); ++n) {
      const i32 i0 = walk.i0, head = walk.h;
      const i32 place = static_cast<i32>(place_of(args, seq, head, i0));
      const i64 first_row = static_cast<i64>(place) * 2 * tile_q;
      const int row = static_cast<int>(seq.q_row0) + i0 + rank * (tile_q / 2);
      wait_empty(smem.Q_empty, n);   // both blocks have used this stage of Q for S and dK
      wait_empty(smem.S_read, n);    // the weights group has read lse and the step
      smem.fill_blocks(walk.blocks, i0, lane, n % n_Q);
      walk.next();
      const bool tests = i0 < whole.begin || i0 >= whole.end;
      warp_sync();   // the walk is everybody's
      const u32 full = at(Q_landed, n);
      if (asks_blocks && lane != 0) mbarrier_arrive(full);   // the kept blocks are written
      if (lane == 0) {
        const u32 flags = 1 | (walk.exists() ? 0 : 2) | (tests ? 4 : 0) | told;
        smem.steps.as<Step>(n % n_steps, 0) = {i0, head, flags, place};
        smem.tiles(0, n % n_steps) = tile;
        if constexpr (deterministic) mbarrier_arrive(at(smem.step_told, n));
        mbarrier_arrive_expect(full, smem.Q[0].n_bytes + 4 * tile_q);
        load_half(smem.Q[n % n_Q], args.maps.Q, full, rank, row, head, batch);
        bulk_load(smem.lse.address(n % n_Q, 0), rows.address(first_row, 4 * tile_q), 4 * tile_q, full);
      }
      wait_empty(smem.dP_read, n);   // the gradients group has read delta
#pragma unroll
      for (int part = dO_parts - 1; part >= 0; --part) {
        const u32 use = dO_use(n, part);
        wait_empty(smem.dO_empty, use);   // both blocks have used this stage of dO for dP and dV
        warp_sync();   // a lane left behind could miss two phases
        if (lane != 0) continue;
        constexpr u32 n_bytes = 2 * tile_q * head_dim_v_tile, row_bytes = 4 * tile_q;
        const u32 full = at(dO_landed, use);
        mbarrier_arrive_expect(full, part == 0 ? n_bytes + row_bytes : n_bytes);
        if constexpr (converts_dO) {
          const i64 first = (part * all_places(args) + place) * (tile_q * head_dim_v_tile);
          bulk_load(smem.dO[0].address(), dO_tiles.address(first, n_bytes), n_bytes, full);
        } else {
          load_half(smem.dO[n % n_dO], args.maps.dO, full, rank, row, head, batch);
        }
        if (part == 0)
          bulk_load(smem.delta.address(n % 2, 0), rows.address(first_row + tile_q, row_bytes), row_bytes,
                    full);
      }
      told |= (told & 8) * 2 | 8;
    }
  }
};

// One warp: rows of Q and dO that do not exist become zeros before anybody sees them.
DEVICE void clean_queries(const Args& args, Smem& smem, int lane) {
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    wait_full(smem.Q_landed, n);   // Q has landed, the step is there
    const Step step = smem.steps.as<Step>(n % n_steps, 0);
    const i32 left = step.exists() ? owner_of(args, tile_of(smem, n)).tile.seq.len_q - step.i0 : tile_q;
    if (left < tile_q) smem.Q[n % n_Q].clear_rows(left, lane, 32);
    fence_async_shared();
    mbarrier_arrive(at(smem.Q_full, n));   // the rows are zeros, also to wgmma
    if (!step.exists()) return;
    for (int part = dO_parts - 1; part >= 0; --part) {
      const u32 use = dO_use(n, part);
      wait_full(smem.dO_landed, use);   // dO has landed
      if (left < tile_q) smem.dO[use % n_dO].clear_rows(left, lane, 32);
      fence_async_shared();
      mbarrier_arrive(at(smem.dO_full, use));   // as above
    }
  }
}

// ---- turns: deterministic clusters add to the dQ of a tile of queries one after the other

// Lane 0 of a warp at each step: visit(n, step).
template <class Visit> DEVICE void at_every_step(Smem& smem, int lane, Visit visit) {
  if (lane != 0) return;
#pragma unroll 1
  for (u32 n = 0;; ++n) {
    wait_full(smem.step_told, n);   // the loader has told it
    const Step step = smem.steps.as<Step>(n % n_steps, 0);
    if (!step.exists()) return;
    visit(n, step);
  }
}
// One warp waits for the turns, so that no product does; it is at most two tiles ahead of what is announced.
DEVICE void wait_for_turns(const Args& args, Smem& smem, int lane) {
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  const Owner own = owner_of(args, blockIdx.x / 2);
  at_every_step(smem, lane, [&](u32 n, const Step& step) {
    wait_empty(smem.announced, n);   // the turn two steps before is over
    turns.wait_for(2 * step.place + own.rank, turn_of(args, own.tile.seq, step.i0, own.tile.j0));
    mbarrier_arrive(at(smem.may_add, n));
  });
}
// Another says that both groups have added.
DEVICE void announce_turns(const Args& args, Smem& smem, int lane) {
  const Global<i32> turns(args.workspace[SLOT_TURNS]);
  const int rank = static_cast<int>(cluster_rank());
  at_every_step(smem, lane, [&](u32 n, const Step& step) {
    wait_full(smem.added, n);   // all warps of both groups have added
    turns.add_release(2 * step.place + rank, 1);
    mbarrier_arrive(at(smem.announced, n));
  });
}
