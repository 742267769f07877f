// trace.cpp - the timeline: per block, step (barriers and mbarrier phases passed), warp and array, the byte
// range touched and the bytes moved.
#include "runtime.hpp"

namespace emulated {

void trace_step(Block* block) { block->step++; }

void trace_access(const Buffer* buffer, const void* address, u32 n_bytes, bool writes) {
  Fiber* fiber = current();
  Worker* worker = fiber->worker;
  const i64 low = static_cast<const u8*>(address) - buffer->low;
  const i32 warp = fiber->linear / 32;
  const Index3 b = fiber->block_index;
  for (size_t i = worker->events.size(), n = 0; i-- > 0 && n < 64;
       n++) {   // is one of the newest bars this one?
    Event& event = worker->events[i];
    if (event.step != fiber->block->step || event.block[0] != b.x || event.block[1] != b.y ||
        event.block[2] != b.z)
      break;
    if (event.warp == warp && event.array == buffer->number && event.writes == writes) {
      event.n_bytes += n_bytes;
      event.low = min(event.low, low);
      event.high = max(event.high, low + static_cast<i64>(n_bytes));
      return;
    }
  }
  worker->events.push_back({{b.x, b.y, b.z},
                            warp,
                            static_cast<i32>(buffer->number),
                            writes,
                            fiber->block->step,
                            n_bytes,
                            low,
                            low + n_bytes});
}

}   // namespace emulated
