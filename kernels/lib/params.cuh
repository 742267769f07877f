// params.cuh - every parameter of a build, once, as a typed constant.  build.py passes each as -DCUFLASH_<NAME>=<int>.
#pragma once
#include "platform.cuh"

#ifndef CUFLASH_JIT   // no build.py: one working default set, so that clangd and nvcc parse any kernel
#define CUFLASH_DTYPE 1
#define CUFLASH_OUT_DTYPE 1
#define CUFLASH_O_DTYPE 1
#define CUFLASH_DOUT_DTYPE 1
#define CUFLASH_HEAD_DIM 64
#define CUFLASH_HEAD_DIM_V 64
#define CUFLASH_TILE_Q 64
#define CUFLASH_TILE_KV 64
#define CUFLASH_N_WARPS 4
#define CUFLASH_N_STAGES 1
#define CUFLASH_CAUSAL 1
#define CUFLASH_WINDOW 0
#define CUFLASH_LENGTHS_Q 0
#define CUFLASH_LENGTHS_K 0
#define CUFLASH_PACKED 0
#define CUFLASH_SOFTCAP 0
#define CUFLASH_ALIBI 0
#define CUFLASH_BIAS_DTYPE -1
#define CUFLASH_MASK 0
#define CUFLASH_BLOCK_MASK 0
#define CUFLASH_BLOCK_Q 1
#define CUFLASH_BLOCK_KV 1
#define CUFLASH_SINK 0
#define CUFLASH_DROPOUT 0
#define CUFLASH_DLSE 0
#define CUFLASH_DBIAS 0
#define CUFLASH_DSINK 0
#define CUFLASH_DALIBI 0
#define CUFLASH_DETERMINISTIC 0
#define CUFLASH_SPLIT 0
#define CUFLASH_PRECISION 0
#define CUFLASH_SMEM_BYTES -1
#define CUFLASH_ARGS_BYTES -1
#endif

// dtype codes: 0 float16, 1 bfloat16, 2 float32, 3 float64, -1 none
constexpr int dtype_code = CUFLASH_DTYPE;
constexpr int out_dtype_code = CUFLASH_OUT_DTYPE;     // forward: of out; backward: of dq, dk, dv
constexpr int o_dtype_code = CUFLASH_O_DTYPE;         // backward: of the forward's out, as given
constexpr int dout_dtype_code = CUFLASH_DOUT_DTYPE;   // backward: of dout, as given
constexpr int bias_dtype_code = CUFLASH_BIAS_DTYPE;
constexpr int head_dim_tile = CUFLASH_HEAD_DIM;       // head_dim rounded up to what the tile holds; args.head_dim is the true one
constexpr int head_dim_v_tile = CUFLASH_HEAD_DIM_V;
constexpr int tile_q = CUFLASH_TILE_Q;
constexpr int tile_kv = CUFLASH_TILE_KV;
constexpr int n_warps = CUFLASH_N_WARPS;
constexpr int n_threads = 32 * n_warps;
constexpr int n_stages = CUFLASH_N_STAGES;
constexpr bool causal = CUFLASH_CAUSAL;
constexpr bool has_window = CUFLASH_WINDOW;
constexpr bool has_query_lengths = CUFLASH_LENGTHS_Q;
constexpr bool has_key_lengths = CUFLASH_LENGTHS_K;
constexpr bool is_packed = CUFLASH_PACKED;
constexpr bool has_softcap = CUFLASH_SOFTCAP;
constexpr bool has_alibi = CUFLASH_ALIBI;
constexpr bool has_bias = CUFLASH_BIAS_DTYPE >= 0;
constexpr bool has_mask = CUFLASH_MASK;
constexpr bool has_block_mask = CUFLASH_BLOCK_MASK;
constexpr int block_q = CUFLASH_BLOCK_Q;
constexpr int block_kv = CUFLASH_BLOCK_KV;
constexpr bool has_sink = CUFLASH_SINK;
constexpr bool has_dropout = CUFLASH_DROPOUT;
constexpr bool has_dlse = CUFLASH_DLSE;
constexpr int dbias_case = CUFLASH_DBIAS;               // 0 none; 1 an entry per score; 2 queries are summed; 3 keys are summed; 4 heads or batches are
constexpr bool wants_dbias = dbias_case != 0;
constexpr bool wants_dsink = CUFLASH_DSINK;
constexpr bool wants_dalibi = CUFLASH_DALIBI;
constexpr bool deterministic = CUFLASH_DETERMINISTIC;
constexpr int n_splits = CUFLASH_SPLIT;                 // blocks that share the keys of a query tile; 0: one has them all
constexpr bool is_split = n_splits > 0;
constexpr int precision_code = CUFLASH_PRECISION;      // float32 inputs: 0 float32 arithmetic, 1 one TF32 product, 2 three TF32 products
constexpr int smem_bytes = CUFLASH_SMEM_BYTES;
constexpr int args_bytes = CUFLASH_ARGS_BYTES;

#undef CUFLASH_DTYPE
#undef CUFLASH_OUT_DTYPE
#undef CUFLASH_O_DTYPE
#undef CUFLASH_DOUT_DTYPE
#undef CUFLASH_HEAD_DIM
#undef CUFLASH_HEAD_DIM_V
#undef CUFLASH_TILE_Q
#undef CUFLASH_TILE_KV
#undef CUFLASH_N_WARPS
#undef CUFLASH_N_STAGES
#undef CUFLASH_CAUSAL
#undef CUFLASH_WINDOW
#undef CUFLASH_LENGTHS_Q
#undef CUFLASH_LENGTHS_K
#undef CUFLASH_PACKED
#undef CUFLASH_SOFTCAP
#undef CUFLASH_ALIBI
#undef CUFLASH_BIAS_DTYPE
#undef CUFLASH_MASK
#undef CUFLASH_BLOCK_MASK
#undef CUFLASH_BLOCK_Q
#undef CUFLASH_BLOCK_KV
#undef CUFLASH_SINK
#undef CUFLASH_DROPOUT
#undef CUFLASH_DLSE
#undef CUFLASH_DBIAS
#undef CUFLASH_DSINK
#undef CUFLASH_DALIBI
#undef CUFLASH_DETERMINISTIC
#undef CUFLASH_SPLIT
#undef CUFLASH_PRECISION
#undef CUFLASH_SMEM_BYTES
#undef CUFLASH_ARGS_BYTES
