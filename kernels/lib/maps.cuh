// maps.cuh - Args with tensor maps behind: the one argument of kernels that copy by TMA (lib/tma.cuh).   sm_90
//
//   KERNEL(n_threads, 1) fwd_07_tma(const __grid_constant__ MappedArgs args)
//   tma_load(smem.K.address(0, 0), args.maps.K, K_full, map_at(0, seq.k_row0 + j0, own.h_k, seq.array_b));
//
// Every map has four axes, innermost first: dim, row, head, batch, and the box (columns, rows, 1, 1) that its
// row in the plan table gives it (row.Map).  Packed: row counts tokens, batch is 0.  Zeros stand outside the
// array: columns from head_dim on, rows from the arrays' length on; a packed sequence is followed by the rows
// of the next one instead.
// cuflash/launch.py reads the names below: keep one field a line.
#pragma once
#include "args.cuh"
#include "tma.cuh"

struct Maps {
  TensorMap Q;
  TensorMap K;
  TensorMap V;
  TensorMap O;
  TensorMap dO;
  TensorMap dQ;
  TensorMap dK;
  TensorMap dV;
  TensorMap dQ_sum;
  TensorMap dK_sum;
  TensorMap dV_sum;
};

struct alignas(64) MappedArgs : Args {
  Maps maps;
  u64 mapped;   // bit n: the n-th of the maps is there
};

// Is the map there?  Always for an input that the row maps, unless the array is empty.  Not for a result that
// TMA cannot address (then store as other rungs do), and not for what the row does not map.
DEVICE bool is_mapped(const MappedArgs& args, const TensorMap& map) {
  return args.mapped >> (&map - &args.maps.Q) & 1;
}

// Coordinates of a box: first column, row (of the array: seq.q_row0 + i), head, batch (seq.array_b).
DEVICE TmaAt map_at(int col, i64 row, i64 head, i64 batch) {
  return tma_at(col, static_cast<int>(row), static_cast<int>(head), static_cast<int>(batch));
}
