// emulated.cuh - the host side of platform.cuh: what a kernel needs to compile as C++17 and to run on a CPU.
//
// Threads of a block are fibers on one OS thread (cuflash/emulator/): whoever runs keeps running until it
// waits, so a kernel needs no locks here and `emulated::self` is always the thread that is asking.
// Everything that waits, checks or counts ends in a function declared here and defined in
// cuflash/emulator/*.cpp.
#pragma once
#include <math.h>
#include <string.h>

#define DEVICE inline
#define CHECKED inline __attribute__((always_inline))   // memory access: worth inlining even at -O1
#define __grid_constant__
#define KERNEL(threads, blocks_per_sm) extern "C" void
#define CLUSTER_KERNEL(threads, blocks_per_sm, cluster, name) \
  extern "C" const int name##_cluster = cluster;              \
  extern "C" void name
#define SHARED_MEMORY(type, name) type& name = *static_cast<type*>(emulated::shared_memory(sizeof(type)))
#define threadIdx (emulated::self->thread_index)
#define blockIdx (emulated::self->block_index)
#define blockDim (emulated::self->block_size)
#define gridDim (emulated::self->grid_size)

namespace emulated {

// Where in the kernel's source a call stands: the default argument of every function that may complain.
struct Here {
  const char* file;
  int line;
  static constexpr Here now(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Index3 {
  u32 x, y, z;
};

// An array passed to the launch: accesses through a pointer into it must stay in [low, high).
struct Buffer {
  const char* name;
  i64 number;   // index into Counters::global
  u8* data;     // address of element 0; negative strides reach below it
  u8* low;
  u8* high;
};

constexpr int max_buffers = 64;
struct Traffic {
  u64 read, written, added;
};   // bytes; added: by atomics and reduce-adds
struct Counters {
  Traffic global[max_buffers];
  u64 shared;         // bytes read or written by ordinary accesses
  u64 async_shared;   // by TMA, bulk copies and wgmma operands
  u64 exps;           // exponentials, one per thread
  u64 tensor_flops;   // 2 M N K per tensor-core instruction
  u64 barriers;       // times a thread passed block_sync or a named barrier
};

// One CUDA thread.  The runtime's Fiber derives from it.
struct Thread {
  Index3 thread_index, block_index, block_size, grid_size;
  int linear;   // thread number in the block
  int lane;
  u8* shared;   // the block's shared memory
  u32 shared_bytes;
  Counters* counters;         // of the OS thread
  bool tracing;               // a timeline was asked for
  const void* hint_address;   // the last address() that was handed out, and the array it lies in
  const Buffer* hint_buffer;
};
extern __thread Thread* self __attribute__((tls_model("initial-exec")));

// ---- scheduler.cpp, sync.cpp, report.cpp, trace.cpp
[[noreturn]] void fail(Here here, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void bad_global(const Buffer* buffer, const void* address, u64 n_bytes, u64 alignment,
                             Here here);
[[noreturn]] void bad_shared(i64 row, i64 col, i64 rows, i64 cols, u64 n_items, const void* address,
                             u64 alignment, Here here);
const Buffer* find_buffer(const void* address);   // nullptr: in none of them
void* shared_memory(u64 n_bytes);   // the block's dynamic shared memory; fails when it is smaller
void touched_shared(const void* address, u32 n_bytes);   // an ordinary access, for the async proxy
void trace_access(const Buffer* buffer, const void* address, u32 n_bytes, bool writes);

// Every live lane of the warp brings n_bytes and gets all lanes' bytes: lane i's are at slots + 64 * i.
// `together` is run once on the slots, when the last lane has come.  name: the instruction, for messages.
const u8* warp_exchange(const char* name, const void* mine, u32 n_bytes, void (*together)(u8* slots),
                        Here here);
void barrier_sync(int id, int n_threads, Here here);   // n_threads 0: the whole block
void barrier_arrive(int id, int n_threads, Here here);
void pause(Here here);   // a spinning thread lets others run

// ---- matrices.cpp: what a warp does with 8 x 8 matrices of 16 bits, and mma.sync
void load_matrices(u32* registers, int count, bool transposed, u32 address, Here here);
void store_matrices(u32 address, const u32* registers, int count, bool transposed, Here here);
u32 transpose_matrix(u32 mine, Here here);
enum class Mma : int { f16_k16, bf16_k16, tf32_k8, f16_k8 };
void multiply_fragments(Mma kind, float* d, const u32* a, const u32* b, Here here);

// ---- copies.cpp: cp.async, TMA, bulk copies.  Each takes effect when it is issued ("early") or when nobody
// could go on without it, or its group is waited for ("late").
void copy_async(u32 shared, const void* global, u32 n_bytes, u32 n_valid, Here here);
void copy_commit();
void copy_wait(int n_pending, Here here);
void copy_arrive(u32 mbarrier, Here here);
struct Coordinates {
  int at[5];
  int rank;
};
void tensor_load(u32 shared, const void* map, u32 mbarrier, Coordinates at, u32 block_mask,
                 Here here);   // mask 0: this block
void tensor_store(const void* map, u32 shared, Coordinates at, bool adds, Here here);
void bulk_load(u32 shared, const void* global, u32 n_bytes, u32 mbarrier, Here here);
void bulk_store(void* global, u32 shared, u32 n_bytes, bool adds, Here here);
void bulk_to_peer(u32 peer_shared, u32 shared, u32 n_bytes, u32 peer_mbarrier, Here here);
void bulk_commit();
void bulk_wait(int n_pending, bool reads_only, Here here);

// ---- proxies.cpp: mbarriers, fences, clusters, registers
void mbarrier_init(u32 address, u32 count, Here here);
void mbarrier_publish();                        // fence.mbarrier_init
void mbarrier_arrive(u32 address, Here here);   // address may be another block's
void mbarrier_expect(u32 address, u32 n_bytes, Here here);
bool mbarrier_test(u32 address, u32 parity, Here here);
void mbarrier_wait(u32 address, u32 parity, Here here);
void fence_async();
u32 cluster_rank();
u32 cluster_size();
u32 cluster_address(u32 address, u32 rank, Here here);   // mapa
u8* cluster_pointer(u32 address, u32 n_bytes, Here here);
void cluster_arrive(Here here);
void cluster_wait(Here here);
void set_registers(int count, bool grows, Here here);
bool elected(Here here);

// ---- products.cpp: wgmma
struct Product {
  float* d;       // n_columns / 2 registers
  const u32* a;   // 4 registers, or nullptr: a_descriptor
  u64 a_descriptor, b_descriptor;
  int n_columns;
  bool is_bf16, transposed_a, transposed_b, accumulates;
};
void product_issue(const Product& product, Here here);
void product_fence();
void product_commit();
void product_wait(int n_pending, Here here);

// ---- small things
CHECKED void count_exp() { self->counters->exps++; }
CHECKED void count_read(const Buffer* buffer, const void* p, u32 n_bytes) {
  self->counters->global[buffer->number].read += n_bytes;
  if (__builtin_expect(self->tracing, 0)) trace_access(buffer, p, n_bytes, false);
}
CHECKED void count_write(const Buffer* buffer, const void* p, u32 n_bytes) {
  self->counters->global[buffer->number].written += n_bytes;
  if (__builtin_expect(self->tracing, 0)) trace_access(buffer, p, n_bytes, true);
}
CHECKED void count_add(const Buffer* buffer, const void* p, u32 n_bytes) {
  self->counters->global[buffer->number].added += n_bytes;
  if (__builtin_expect(self->tracing, 0)) trace_access(buffer, p, n_bytes, true);
}
CHECKED void count_shared([[maybe_unused]] const void* p, u32 n_bytes) {
  self->counters->shared += n_bytes;
#ifdef CUFLASH_ASYNC_PROXY   // set by the emulator's compile for sources that use TMA or wgmma
  touched_shared(p, n_bytes);
#endif
}

// The door of every global access: right array, inside it, aligned.
CHECKED u8* checked_global(const Buffer* buffer, const void* base, i64 offset, u64 n_bytes, u64 alignment,
                           Here here) {
  const u64 address = reinterpret_cast<u64>(base) + static_cast<u64>(offset);
  if (__builtin_expect(buffer == nullptr || address < reinterpret_cast<u64>(buffer->low) ||
                           address + n_bytes > reinterpret_cast<u64>(buffer->high) ||
                           address % alignment != 0,
                       0))
    bad_global(buffer, reinterpret_cast<const void*>(address), n_bytes, alignment, here);
  return reinterpret_cast<u8*>(address);
}

// The 32-bit shared-window address that instructions take, and back.  The window begins at 1024, as on the
// device.
constexpr u32 shared_window = 1024;
inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const u8*>(p) - self->shared) + shared_window;
}
u8* shared_pointer(u32 address, u32 n_bytes, u32 alignment, Here here);

// Atomic add on memory that other OS threads may be adding to: the old value.
template <class T> inline T atomic_add(T* p, T value) {
  T old, sum;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do sum = old + value;
  while (!__atomic_compare_exchange(p, &old, &sum, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  return old;
}

// Calls a kernel of any signature with one pointer per parameter, as cuLaunchKernel does.
template <int... i> struct Indices {};
template <int n, int... i> struct Count : Count<n - 1, n - 1, i...> {};
template <int... i> struct Count<0, i...> {
  using type = Indices<i...>;
};
template <class T> struct Plain {
  using type = T;
};
template <class T> struct Plain<const T> {
  using type = T;
};

template <class... P, int... i> inline void call_with(void (*kernel)(P...), void* const* p, Indices<i...>) {
  kernel(*static_cast<typename Plain<P>::type*>(p[i])...);
}
template <class... P> inline void call(void (*kernel)(P...), void* const* p) {
  call_with(kernel, p, typename Count<sizeof...(P)>::type());
}
// sizes[i] = bytes of parameter i; returns how many there are.
template <class... P> inline int parameter_sizes(void (*)(P...), u64* sizes) {
  const u64 all[] = {sizeof(P)..., 0};
  for (u64 i = 0; i < sizeof...(P); i++) sizes[i] = all[i];
  return sizeof...(P);
}

}   // namespace emulated

// CUDA's own min and max
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
