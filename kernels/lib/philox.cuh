// philox.cuh - which weights dropout keeps: Philox-4x32-10, one 32-bit word per score, no tile in it.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
// = cuflash/philox.py, bit for bit.
#pragma once
#include "args.cuh"
#include "memory.cuh"
#include "types.cuh"

struct Words4 {
  u32 word[4];
};

DEVICE u32 high_product(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }

DEVICE Words4 philox_4x32_10(Words4 counter, u32 key0, u32 key1) {
  constexpr u32 M0 = 0xD2511F53, M1 = 0xCD9E8D57;   // multipliers
  constexpr u32 W0 = 0x9E3779B9, W1 = 0xBB67AE85;   // key schedule: golden ratio, sqrt(3) - 1
  u32 (&c)[4] = counter.word;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = high_product(M0, c[0]), low0 = M0 * c[0];
    const u32 high1 = high_product(M1, c[2]), low1 = M1 * c[2];
    c[0] = high1 ^ c[1] ^ key0;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ key1;
    c[3] = low0;
    key0 += W0;
    key1 += W1;
  }
  return counter;
}

// What the scores of one (sequence, head) share.
struct Dropout {
  u32 key0, key1;
  u32 head, batch;   // counter words 2 and 3
  i64 i0, j0;        // shift of the counter: this problem is a shard of a larger one
  u32 threshold;     // a weight is kept when its word >= threshold
};

DEVICE Dropout dropout_of(const Args& args, i64 b, i64 h) {
  u64 seed = args.seed;
  if (args.seed_pointer != nullptr) seed = Global<u64>(args.seed_pointer).load(0);
  return {static_cast<u32>(seed), static_cast<u32>(seed >> 32),
          static_cast<u32>(h + args.dropout_head0), static_cast<u32>(b + args.dropout_batch0),
          args.dropout_i0, args.dropout_j0, static_cast<u32>(args.dropout_threshold)};
}

DEVICE Words4 dropout_words(const Dropout& dropout, i64 i, i64 j_block) {
  const u32 row = static_cast<u32>(i + dropout.i0);
  const Words4 counter = {static_cast<u32>(j_block), row, dropout.head, dropout.batch};
  return philox_4x32_10(counter, dropout.key0, dropout.key1);
}

// Is the weight of (i, j) kept?  i, j count inside the sequence.
DEVICE bool dropout_keeps(const Dropout& dropout, i64 i, i64 j) {
  const i64 column = j + dropout.j0;
  const Words4 words = dropout_words(dropout, i, column >> 2);
  const int which = static_cast<int>(column & 3);
  u32 word = words.word[0];
#pragma unroll
  for (int w = 1; w < 4; ++w) word = w == which ? words.word[w] : word;   // no indexing of registers
  return word >= dropout.threshold;
}

// Bits 0 to 3: are (i, j) to (i, j + 3) kept?  One Philox call when j + j0 is a multiple of 4, else two.
DEVICE u32 dropout_keeps_4(const Dropout& dropout, i64 i, i64 j) {
  const i64 column = j + dropout.j0;
  const int shift = static_cast<int>(column & 3);
  u32 bits = 0;
  const Words4 first = dropout_words(dropout, i, column >> 2);
#pragma unroll
  for (int w = 0; w < 4; ++w) bits |= static_cast<u32>(first.word[w] >= dropout.threshold) << w;
  if (shift != 0) {
    const Words4 second = dropout_words(dropout, i, (column >> 2) + 1);
#pragma unroll
    for (int w = 0; w < 4; ++w) bits |= static_cast<u32>(second.word[w] >= dropout.threshold) << (4 + w);
  }
  return bits >> shift & 15;
}
