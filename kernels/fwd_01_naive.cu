// fwd_01_naive.cu - attention forward, the online softmax and nothing else: a thread per query row.   any GPU
//
// Read after   std_00_unfused.cu          Read next   fwd_02_tiled.cu
// Changes      no row of scores is ever stored: a thread keeps the running maximum m, the running sum l and
//              its row of O
//
// Algorithm    for each key j that the row may see:
//                s = scale q.k             m_new = max(m, s)
//                l = l 2^(m - m_new) + 2^(s - m_new)
//                O = O 2^(m - m_new) + 2^(s - m_new) v
//                O / l -> O_gmem           m + log l -> lse
//              head_dim_v above HEAD_DIM_V: one thread per row and chunk of V, each makes the scores again.
// Grid         x: one thread per row of a chunk; i + len_q * (head + heads * (batch + n_batch * v_chunk))
// Registers    per thread: HEAD_DIM_V numbers of O
// Bytes        per thread and key: its row of Q again, the row of K, a chunk of the row of V.  Neighbouring
//              threads stand on neighbouring rows and read the same K and V: the caches, not the code, save
//              HBM.
#include "lib/params.cuh"
#include "lib/mask.cuh"
#include "lib/score.cuh"
#include "lib/softmax.cuh"

KERNEL(n_threads, 1) fwd_01_naive(const __grid_constant__ Args args) {
  i64 rest = static_cast<i64>(blockIdx.x) * n_threads + threadIdx.x;
  const i32 i = static_cast<i32>(rest % args.len_q);
  rest /= args.len_q;
  const i64 h = rest % args.heads, h_k = h / (args.heads / args.heads_k);
  rest /= args.heads;
  const i64 b = rest % args.batch, v0 = rest / args.batch * head_dim_v_tile;
  if (v0 >= args.head_dim_v) return;   // the last block is not full

  const Sequence seq = sequence_of(args, b);
  const Scoring scoring = scoring_of(args, seq, h);
  const Global<elem> Q(args.Q.data), K(args.K.data), V(args.V.data);
  const i64 q_row = index_of(args.Q, b, h, i);
  const i32 n_v = static_cast<i32>(smallest<i64>(args.head_dim_v - v0, head_dim_v_tile));

  acc O[head_dim_v_tile], m = NEG_INF, l = 0;
#pragma unroll
  for (int d = 0; d < head_dim_v_tile; ++d) O[d] = 0;

  const Range keys = visible_keys(args, seq, i);
#pragma unroll 1
  for (i32 j = keys.begin; j < keys.end; ++j) {
    const i64 k_row = index_of(args.K, b, h_k, j);
    acc product = 0;
#pragma unroll 4
    for (i64 d = 0; d < args.head_dim; ++d)
      product += convert<acc>(Q.load(q_row + d)) * convert<acc>(K.load(k_row + d));

    const acc s = capped_log2(scoring, product);
    const acc m_new = largest(m, s), reference = finite_max(m_new);
    const acc shrink = rescaling(m, reference), P = exp_score(s - reference);
    m = m_new;
    l = l * shrink + P;
    const i64 v_row = index_of(args.V, b, h_k, j) + v0;
#pragma unroll
    for (int d = 0; d < head_dim_v_tile; ++d)
      if (d < n_v) O[d] = O[d] * shrink + P * convert<acc>(V.load(v_row + d));
  }

  const RowEnd end = finish_row(m, l, NEG_INF, 1);
  const Global<out_elem> out(args.O.data);
  const i64 o_row = index_of(args.O, b, h, i) + v0;
#pragma unroll
  for (int d = 0; d < head_dim_v_tile; ++d)
    if (d < n_v) out.store(o_row + d, convert<out_elem>(O[d] * end.factor));
  if (v0 == 0) Global<acc>(args.lse.data).store(index_of(args.lse, b, h, i), end.lse);
}
