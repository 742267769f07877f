// args.cuh - the one argument of every kernel.  cuflash/launch.py reads this file to learn the layout: keep one field a line.
#pragma once
#include "platform.cuh"

// An array of vectors: the last axis (dim) is contiguous, the other strides are in elements.
// vector_bytes: 16 when the address, every stride in bytes and the vector's own bytes are multiples of 16, else 0.
struct Tensor {
  void* data;
  i64 batch;
  i64 row;
  i64 head;
  i64 vector_bytes;
};

// One number per query row: lse, dlse; of the workspace delta = rowsum(dO * O) - dlse and lse_log2 = lse * log2(e), +inf
// for a row that attends to nothing.  (batch, heads, len_q), strides in elements.
struct PerRow {
  void* data;
  i64 batch;
  i64 head;
  i64 row;
};

// One number per score: bias, mask, dbias.  Strides in elements, 0 along a broadcast axis.
// rows, cols: entries along the last two axes, 2^62 along a broadcast axis (packed calls hide what lies past them).
struct Scores {
  void* data;
  i64 batch;
  i64 head;
  i64 row;
  i64 col;
  i64 rows;
  i64 cols;
};

// One number per (batch, head): ALiBi slopes, sink.  Stride 0 where broadcast.
struct PerHead {
  void* data;
  i64 batch;
  i64 head;
};

// Lengths (batch,) or cumulative lengths (batch + 1,), int32 or int64; data is null when not given.
struct Lengths {
  void* data;
  i64 stride;
  i64 bytes;
};

// Block-level CSR: row r of (batch, head) keeps columns indices[indptr[r] .. indptr[r + 1]), ascending.
struct BlockRows {
  i32* indptr;
  i32* indices;
  i64 batch;
  i64 head;
};

struct Args {
  Tensor Q;
  Tensor K;
  Tensor V;
  Tensor O;
  Tensor dO;
  Tensor dQ;
  Tensor dK;
  Tensor dV;
  Tensor dQ_sum;
  Tensor dK_sum;
  Tensor dV_sum;
  PerRow lse;
  PerRow dlse;
  PerRow delta;
  PerRow lse_log2;
  Scores bias;
  Scores mask;
  Scores dbias;
  PerHead alibi;
  PerHead dalibi;
  PerHead sink;
  PerHead dsink;
  Lengths query_lengths;
  Lengths key_lengths;
  Lengths cu_seqlens_q;
  Lengths cu_seqlens_k;
  BlockRows blocks;
  BlockRows blocks_of_key;
  u64* seed_pointer;
  u64 seed;
  i64 dropout_batch0;
  i64 dropout_head0;
  i64 dropout_i0;
  i64 dropout_j0;
  u64 dropout_threshold;
  double dropout_scale;
  void* workspace[8];
  double scale;
  double softcap;
  i64 batch;
  i64 len_q;
  i64 len_k;
  i64 heads;
  i64 heads_k;
  i64 head_dim;
  i64 head_dim_v;
  i64 window_left;
  i64 window_right;
  i64 query_offset;
  i64 offset_is_given;
  i64 n_splits;
};
