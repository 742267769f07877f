// runtime.hpp - what the emulator's parts share: launches, workers (OS threads), blocks, warps, fibers.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "platform.cuh"

namespace emulated {

constexpr int max_warps = 32;                   // of a block
constexpr int max_positions = 16 * max_warps;   // warps of a cluster
constexpr u32 slot_bytes = 64;
constexpr u64 stack_bytes = 128 << 10;
constexpr u64 guard_bytes = 16 << 10;
constexpr u32 largest_shared = 256 << 10;

// What Python fills in; the order of fields is that of module.py.
struct Request {
  const char* kernel;
  void (*entry)(void* const* parameters);
  void* const* parameters;
  const Buffer* buffers;
  i64 n_buffers;
  u32 grid[3];
  u32 block[3];
  u32 shared_bytes;
  u32 cluster;         // blocks of one cluster, along x
  u64 seed;            // 0: threads in order; odd: one warp runs ahead; even: random
  u32 late_copies;     // 1: copies land when somebody waits for them, 0: when they are issued
  u32 late_products;   // 1: wgmma runs when it is waited for
  u32 n_workers;
  u32 timeline;      // 1: record events
  u32 async_proxy;   // 1: the kernel uses TMA or wgmma
  u32 blocks_per_sm;       // of __launch_bounds__
  double stall_seconds;   // CPU time a worker may spend without any synchronisation
};

// One bar of the timeline: what a warp of a block did to an array between two barriers.
struct Event {
  u32 block[3];
  i32 warp;
  i32 array;   // number of the buffer
  i32 writes;
  u32 step;        // barriers and mbarrier phases the block had passed
  u32 n_bytes;     // moved
  i64 low, high;   // touched byte range of the array
};
struct Block;
struct Worker;
struct Fiber;
struct Launch;

enum class Wait { nothing, barrier, warp, mbarrier, cluster, products, registers, spin };

struct Warp {
  u32 live, ready, arrived;   // masks of lanes
  int position;               // index into the worker's ready set
  const char* name;           // of the collective that lanes are gathering for
  void (*together)(u8* slots);
  Here where;
  u32 generation;
  alignas(64) u8 slots[2][32 * slot_bytes];   // two, so that a fast lane may start the next exchange
  Fiber* lanes[32];
};

// ---- what runs beside the threads

struct Range {
  u32 offset, n_bytes;
};   // of shared memory

struct CpAsync {   // one cp.async of one thread, not yet landed
  u32 offset;
  const u8* global;
  const Buffer* buffer;
  u32 n_bytes, n_valid;
  u64 group;
};

struct TensorMapData {   // what tensormap.py writes for the emulator
  u32 magic;
  u8 itemsize, rank, swizzle, is_float;
  u64 address;
  u64 dims[5];
  u64 strides[4];   // bytes, of axes 1 to rank - 1
  unsigned short box[5];
};
constexpr u32 tensor_map_magic = 0x50414d54;

struct Copy {   // a load into shared memory, or the arrival that cp.async announces
  enum Kind { tensor, bulk, peer, arrival } kind;
  Block* block;   // that issued it
  Fiber* fiber;
  u32 blocks;                      // mask of ranks it lands in
  u32 offset, n_bytes, mbarrier;   // offsets in shared memory
  TensorMapData map;
  Coordinates at;
  const u8* global;
  const Buffer* buffer;
  u32 source;                    // peer: offset in the issuer's shared memory
  std::vector<CpAsync> pieces;   // arrival: what must land first
  Here here;
};

struct Store {   // shared to global; group: number of commits before it
  bool tensor, adds;
  TensorMapData map;
  Coordinates at;
  u8* global;
  const Buffer* buffer;
  u32 offset, n_bytes;
  u64 group;
  std::vector<u8> data;   // what was read from shared memory
  bool is_read, is_written;
  Here here;
};

struct Known {   // registers that a wgmma used: what they held at the last fence
  const void* at;
  u32 n_bytes;
  u64 hash;
};

struct FiberAsync {
  std::vector<CpAsync> copies;
  u64 copies_committed = 0;
  std::vector<Store> stores;
  u64 stores_committed = 0;
  std::vector<Range> touched;   // by ordinary accesses since the last proxy fence
  u64 products_issued = 0;
  std::vector<u64> product_groups;   // products_issued at each commit
  bool product_fenced = false;
  std::vector<Known> known;
  u64 cluster_phase = 0;
  bool cluster_arrived = false;
  int registers = 0;
};

struct MBarrier {
  u32 offset;
  bool published;
  Fiber* owner;
  Here where, expected_at;
  std::vector<Fiber*> waiting;
};

struct Issued {   // a wgmma as its 128 threads have issued it so far
  Product product;
  float* d[128];
  const u32* a[128];
  int n_issued;   // threads
  int of_warp[4];
  std::vector<float> a_rows, b_rows;   // operands from shared memory once read: a_rows[k][64], b_rows[k][n]
  bool done;
  Here here;
};

struct BlockAsync {
  u8* view;   // shared memory as the async proxy sees it
  std::vector<MBarrier> mbarriers;
  std::vector<Issued> products[8];   // per warpgroup
  i64 free_registers = 0;
};

struct Fiber : Thread {
  jmp_buf context;
  ucontext_t start;
  bool started, finished;
  u8* stack;
  Worker* worker;
  Block* block;
  Warp* warp;
  Wait wait;
  Here where;
  u64 wait_a, wait_b;   // barrier id, or mbarrier address and parity, or registers wanted
  FiberAsync* async;
};

struct Barrier {
  int expected, arrived;
  Here where;
  u32 waiting[max_warps];
};

struct Block {
  Worker* worker;
  Index3 index;
  u32 rank;   // in the cluster
  int n_threads, n_warps, n_live;
  u8* shared;   // largest_shared bytes, 1024-aligned
  Fiber** fibers;
  Warp warps[max_warps];
  Barrier barriers[16];
  u32 step;   // barriers and mbarrier phases passed: the clock of the timeline
  BlockAsync* async;
};

struct Launch {
  Request request;
  std::atomic<u64> next_team{0};
  std::atomic<u64> teams_done{0};
  std::atomic<int> workers_left{0};
  std::atomic<bool> stop{false};
  u64 n_teams = 0;
  std::mutex guard;
  std::condition_variable finished;
  std::string error;        // the first one
  Counters counters = {};   // summed when a worker ends
  std::vector<Event> events;
  std::vector<Worker*> workers;
  std::vector<std::thread> threads;
  Launch();
  ~Launch();
};

struct Worker {
  Launch* launch = nullptr;
  Counters counters;
  jmp_buf home;
  std::vector<Fiber*> fibers;   // kept from launch to launch, with their stacks
  std::vector<Block*> blocks;   // of the running cluster
  int n_blocks = 0;
  int n_live = 0;   // threads that have not left the kernel
  u64 ready[max_positions / 64];
  Warp* by_position[max_positions];
  int n_positions = 0;
  int cursor = 0;
  u64 random_state = 1;
  std::vector<Fiber*> paused;
  std::vector<Copy> pending;   // loads that have not landed
  u64 cluster_phase = 0;
  int cluster_arrived = 0;
  std::atomic<u64> progress{0};
  std::atomic<bool> timed_out{false};
  u8* signal_stack = nullptr;
  pthread_t thread;
  std::vector<Event> events;

  u64 random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
  }
};

inline Fiber* current() { return static_cast<Fiber*>(self); }

// scheduler.cpp
void wake(Fiber* fiber);
void wake_lanes(Worker* worker, Warp* warp, u32 lanes);
void suspend(Wait wait, Here here);   // returns when somebody has woken this fiber
[[noreturn]] void go_home(Worker* worker, int why);
constexpr int home_done = 1, home_failed = 2, home_stopped = 3;
void run_team(Worker* worker, u64 team);

// sync.cpp
void lane_left(Fiber* fiber);
void finish_exchange(Warp* warp);

// copies.cpp
bool advance_copies(Worker* worker);   // nobody can run: lets one pending copy land; false when there is none
void finish_stores(Fiber* fiber);      // at the end of a thread
const Buffer* buffer_of(const void* address);

// proxies.cpp
void set_up_async(Block* block);
void check_exit(Fiber* fiber);   // what a thread must not leave unfinished
void drop_async(Worker* worker, bool finished);
MBarrier& mbarrier_at(Block* block, u32 offset, Here here);
void mbarrier_credit(Block* block, u32 offset, u32 n_bytes, Here here);
void mbarrier_count_arrival(Block* block, u32 offset, Here here);
std::string describe_mbarrier(Block* block, u64 offset);
void cluster_check(Worker* worker);   // is the cluster barrier complete?
Block* cluster_block(u32& address, u32 n_bytes,
                     Here here);   // splits a cluster address: block, and offset in address

// products.cpp
void set_up_products(Block* block);

// numbers
inline u32 swizzled(u32 offset, u32 swizzle) {   // swizzle 1: 128 bytes, 2: 64, 3: 32 (wgmma's codes)
  const u32 mask = swizzle == 0 ? 0 : swizzle == 1 ? 7 : swizzle == 2 ? 3 : 1;
  return offset ^ ((offset >> 7 & mask) << 4);
}
inline float half_to_float(u16 bits) {
  const u32 sign = static_cast<u32>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  const float value =
      magnitude < 0x400 ? magnitude * 0x1p-24f : __builtin_bit_cast(float, (magnitude << 13) + (112u << 23));
  return sign ? -value : value;
}
inline float bfloat_to_float(u16 bits) { return __builtin_bit_cast(float, static_cast<u32>(bits) << 16); }
inline float tf32_to_float(u32 bits) { return __builtin_bit_cast(float, bits & 0xffffe000u); }

// trace.cpp
void trace_step(Block* block);   // the block passed a barrier

// report.cpp
[[noreturn]] void fail_team(Worker* worker, const std::string& message);
[[noreturn]] void report_deadlock(Worker* worker);
std::string describe(const Fiber* fiber, Here here, const std::string& message);
void catch_signals();
void release_signals();
void use_signal_stack(Worker* worker);

}   // namespace emulated
