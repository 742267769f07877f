// reduce.cuh - one number out of a block, always summed in the same order.
#pragma once
#include "barrier.cuh"
#include "memory.cuh"
#include "warp.cuh"

template <int threads> struct BlockSum {
  Shared<double, 1, threads / 32> of_warp;

  // The sum over all threads; thread 0 has it.  In double: it goes over every row of a problem.
  DEVICE double operator()(double number, int thread) {
    number = warp_sum(number);
    if (thread % 32 == 0) of_warp(0, thread / 32) = number;
    block_sync();   // every warp has written its sum
    double total = 0;
    if (thread == 0)
      for (int warp = 0; warp < threads / 32; warp++) total += of_warp(0, warp);
    block_sync();   // thread 0 has read: of_warp may be overwritten
    return total;
  }
};
