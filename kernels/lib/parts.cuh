// parts.cuh - choices of fwd_05_pipeline that its tile rows make, as typed constants.
#pragma once
#include "params.cuh"

#ifndef CUFLASH_PARTS
#define CUFLASH_PARTS 1
#define CUFLASH_UNROLLED 1
#define CUFLASH_BLOCKS 1
#endif

constexpr int n_parts = CUFLASH_PARTS;            // tiles of K and V that come together, for one barrier
constexpr int unrolled_parts = CUFLASH_UNROLLED;  // of them written out one after the other
constexpr int blocks_per_sm = CUFLASH_BLOCKS;     // for which registers must suffice
constexpr int span = tile_kv * n_parts;           // keys that come together

#undef CUFLASH_PARTS
#undef CUFLASH_UNROLLED
#undef CUFLASH_BLOCKS
