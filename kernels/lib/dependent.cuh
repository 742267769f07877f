// dependent.cuh - a kernel that starts while the one before it on the stream still ends.   sm_90 and later
//
// Programmatic dependent launch: a Step with overlaps=True (cuflash/row.py) may start as soon as every block of
// the kernel before it has called next_kernel_may_start() or ended.  Then
//   previous_kernel_wait()    returns when the kernel before has ended and what it wrote may be read
// Where the launch does not overlap both do nothing.  Every block of an overlapping kernel waits, even one
// without work: a kernel that had ended before the one before it would let the one after it read too soon.
#pragma once
#include "platform.cuh"

#ifdef CUFLASH_EMULATED   // launches follow one another
DEVICE void previous_kernel_wait() {}
DEVICE void next_kernel_may_start() {}
#else
DEVICE void previous_kernel_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void next_kernel_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif
