// schedule.cuh - choices of a persistent Hopper kernel that its tile rows make, as typed constants.
#pragma once
#include "params.cuh"

#ifndef CUFLASH_PERSISTENT
#define CUFLASH_PERSISTENT 2
#define CUFLASH_O_BUFFER 1
#define CUFLASH_HOLD 0
#define CUFLASH_EARLY 0
#endif

constexpr bool is_persistent = CUFLASH_PERSISTENT != 0;    // a block walks many query tiles; else it has one
constexpr bool asks_for_work = CUFLASH_PERSISTENT == 2;    // the next is whoever asks first's; else every gridDim-th
constexpr bool has_o_buffer = CUFLASH_O_BUFFER;            // O has a tile of its own; else Q's
constexpr bool holds_softmax = CUFLASH_HOLD;               // exponentials may not sink below the wait for P V
constexpr bool rescales_early = CUFLASH_EARLY;             // O is rescaled while Q K^T runs, one tile late

#undef CUFLASH_PERSISTENT
#undef CUFLASH_O_BUFFER
#undef CUFLASH_HOLD
#undef CUFLASH_EARLY
