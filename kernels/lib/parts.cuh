// parts.cuh - choices of fwd_05_pipeline that its tile rows make, as typed constants.
#pragma once
#include "params.cuh"

#ifndef CUFLASH_PARTS
#define CUFLASH_PARTS 1
#define CUFLASH_BLOCKS 1
#define CUFLASH_KEPT 0
#define CUFLASH_NOTED 0
#endif

constexpr int n_parts = CUFLASH_PARTS;            // tiles of K and V that come together, for one barrier
constexpr int blocks_per_sm = CUFLASH_BLOCKS;     // for which registers must suffice
constexpr int kept_steps = CUFLASH_KEPT;          // of Q K^T whose Q stays in registers
constexpr bool notes_begins = CUFLASH_NOTED;      // where K and V begin lies in shared memory
constexpr int span = tile_kv * n_parts;           // keys that come together

#undef CUFLASH_PARTS
#undef CUFLASH_BLOCKS
#undef CUFLASH_KEPT
#undef CUFLASH_NOTED
