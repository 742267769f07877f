// bwd_01_naive.cu - attention backward, one thread per row; P again from lse.   any GPU
//
// Read after   fwd_01_naive.cu            Read next   bwd_02_tiled.cu
// Changes      nothing was stored but lse: P = e^(s - lse) costs one product; delta (pass_delta.cu) replaces
//              the row sum of P * dP that softmax's derivative asks for
//
// Algorithm    P = e^(score - lse),   dP = dO.v,   dS = P (dP - delta)
//              bwd_01_naive       a thread owns row j of dK and dV
//                for each query head of its group, each query i that sees j:
//                  dV += P dO_i,   dK += dS Q_i           (GQA: summed in the thread)
//              bwd_01_naive__dq   a thread owns row i of dQ
//                for each key j that it sees:
//                  dQ += dS K_j
//              Seven products where five would do.  In return each row has one owner: nothing is added up in
//              memory, and the same inputs always give the same bits.
//              head_dim above HEAD_DIM: one thread per row and chunk of columns.
// Grid         x: n_threads threads a block; thread = row + len * (head + heads * (batch + n_batch * chunk))
// Registers    per thread: HEAD_DIM numbers of dK and HEAD_DIM_V of dV, or HEAD_DIM of dQ
// Bytes        per pair: a row of Q, K, dO, V each, and a chunk again; delta and lse once per pair
#include "lib/params.cuh"
#include "lib/mask.cuh"
#include "lib/score.cuh"

// Which row a thread owns.
struct OwnRow {
  i64 b, h, chunk;
  i32 row;
};

DEVICE OwnRow own_row_of(const Args& args, i64 length, i64 heads) {
  const i64 thread = static_cast<i64>(blockIdx.x) * n_threads + threadIdx.x, head = thread / length,
            b = head / heads;
  return {b % args.batch, head % heads, b / args.batch, static_cast<i32>(thread % length)};
}

struct Pair {
  acc P;
  acc dS;
};

// One query row and one key row, given by the index of their first elements.
DEVICE Pair pair_of(const Args& args, const Scoring& scoring, i64 b, i64 h, i64 h_k, i32 i, i32 j) {
  const Global<elem> Q(args.Q.data), K(args.K.data), V(args.V.data);
  const Global<dout_elem> dO(args.dO.data);
  const i64 q_row = index_of(args.Q, b, h, i), k_row = index_of(args.K, b, h_k, j);
  const i64 v_row = index_of(args.V, b, h_k, j), do_row = index_of(args.dO, b, h, i);
  acc product = 0, dP = 0;
#pragma unroll 4
  for (i64 d = 0; d < args.head_dim; d++)
    product += convert<acc>(Q.load(q_row + d)) * convert<acc>(K.load(k_row + d));
#pragma unroll 4
  for (i64 d = 0; d < args.head_dim_v; d++)
    dP += convert<acc>(dO.load(do_row + d)) * convert<acc>(V.load(v_row + d));
  const acc lse = Global<acc>(args.lse.data).load(index_of(args.lse, b, h, i));
  const acc delta = Global<acc>(args.delta.data).load(index_of(args.delta, b, h, i));
  const acc score = capped_log2(scoring, product);
  if (lse == NEG_INF || score == NEG_INF) return {};   // hidden, whatever made it so: dP may be NaN
  const acc P = exp_near(score - lse);
  return {P, P * (dP - delta)};
}

// block[d] += factor * row[d], a chunk of it.
template <class From, int tile> DEVICE void add_row(acc (&block)[tile], acc factor, const Tensor& tensor,
                                                    i64 b, i64 row, i64 h, i64 d0, i64 dim) {
  const Global<From> from(tensor.data);
  const i64 first = index_of(tensor, b, h, row) + d0;
#pragma unroll
  for (int d = 0; d < tile; d++)
    if (d0 + d < dim) block[d] += factor * convert<acc>(from.load(first + d));
}

template <int tile> DEVICE void store_row(const acc (&block)[tile], acc scale, const Tensor& tensor, i64 b,
                                          i64 row, i64 h, i64 d0, i64 dim) {
  const i64 first = index_of(tensor, b, h, row) + d0;
#pragma unroll
  for (int d = 0; d < tile; d++)
    if (d0 + d < dim) Global<out_elem>(tensor.data).store(first + d, convert<out_elem>(block[d] * scale));
}

KERNEL(n_threads, 1) bwd_01_naive(const __grid_constant__ Args args) {
  const OwnRow own = own_row_of(args, args.len_k, args.heads_k);
  const i64 d0 = own.chunk * head_dim_tile, d0_v = own.chunk * head_dim_v_tile,
            group = args.heads / args.heads_k;
  if (d0 >= args.head_dim && d0_v >= args.head_dim_v) return;   // the last block is not full
  const Sequence seq = sequence_of(args, own.b);
  const Range queries = visible_queries(args, seq, own.row, own.row);

  acc dK[head_dim_tile], dV[head_dim_v_tile];
#pragma unroll
  for (int d = 0; d < head_dim_tile; d++) dK[d] = 0;
#pragma unroll
  for (int d = 0; d < head_dim_v_tile; d++) dV[d] = 0;

#pragma unroll 1
  for (i64 h = own.h * group; h < (own.h + 1) * group; h++) {
    const Scoring scoring = natural_scoring_of(args, seq, h);
#pragma unroll 1
    for (i32 i = queries.begin; i < queries.end; i++) {
      const Pair pair = pair_of(args, scoring, own.b, h, own.h, i, own.row);
      add_row<elem>(dK, pair.dS, args.Q, own.b, i, h, d0, args.head_dim);
      add_row<dout_elem>(dV, pair.P, args.dO, own.b, i, h, d0_v, args.head_dim_v);
    }
  }
  if (args.dK.data != nullptr)
    store_row(dK, static_cast<acc>(args.scale), args.dK, own.b, own.row, own.h, d0, args.head_dim);
  if (args.dV.data != nullptr) store_row(dV, acc(1), args.dV, own.b, own.row, own.h, d0_v, args.head_dim_v);
}

KERNEL(n_threads, 1) bwd_01_naive__dq(const __grid_constant__ Args args) {
  const OwnRow own = own_row_of(args, args.len_q, args.heads);
  const i64 d0 = own.chunk * head_dim_tile, h_k = own.h / (args.heads / args.heads_k);
  if (d0 >= args.head_dim) return;   // the last block is not full
  const Sequence seq = sequence_of(args, own.b);
  const Scoring scoring = natural_scoring_of(args, seq, own.h);
  const Range keys = visible_keys(args, seq, own.row);

  acc dQ[head_dim_tile];
#pragma unroll
  for (int d = 0; d < head_dim_tile; d++) dQ[d] = 0;

#pragma unroll 1
  for (i32 j = keys.begin; j < keys.end; j++) {
    const Pair pair = pair_of(args, scoring, own.b, own.h, h_k, own.row, j);
    add_row<elem>(dQ, pair.dS, args.K, own.b, j, h_k, d0, args.head_dim);
  }
  store_row(dQ, static_cast<acc>(args.scale), args.dQ, own.b, own.row, own.h, d0, args.head_dim);
}
