// schedule.cuh - choices of a persistent Hopper kernel that its tile rows make, as typed constants.
#pragma once
#include "params.cuh"

#ifndef CUFLASH_PERSISTENT
#define CUFLASH_PERSISTENT 2
#define CUFLASH_O_BUFFER 1
#define CUFLASH_Q_STAGES 1
#define CUFLASH_OVERLAP 0
#define CUFLASH_LATE 1
#define CUFLASH_PLANS 0
#endif

constexpr bool asks_for_work = CUFLASH_PERSISTENT == 2;  // who asks first gets it; else every gridDim-th
constexpr bool has_o_buffer = CUFLASH_O_BUFFER == 1;     // O leaves through shared memory of its own,
constexpr bool borrows_V = CUFLASH_O_BUFFER == 2;        // or through stages of V; else from registers
constexpr int q_stages = CUFLASH_Q_STAGES;               // tiles of Q at once: the next comes early
constexpr bool weighs_ahead = CUFLASH_OVERLAP;           // weights are made while the P V before runs
constexpr bool only_scales = CUFLASH_LATE;               // by a positive number: it waits for the softmax
constexpr bool plans = CUFLASH_PLANS;                    // a warp of its own takes the next query tile, early

#undef CUFLASH_PERSISTENT
#undef CUFLASH_O_BUFFER
#undef CUFLASH_Q_STAGES
#undef CUFLASH_OVERLAP
#undef CUFLASH_LATE
#undef CUFLASH_PLANS
