// products.cpp - wgmma.  "Early" a warp's rows of A are read when its 32 threads have issued the product, B
// when the first warp has, and D is written when all 128 threads have: what another warp is still to write to
// shared memory is missed. "Late" all of it happens when the first thread waits for the group, with memory
// and registers as they are by then.
#include "runtime.hpp"

namespace emulated {

void set_up_products(Block* block) {
  for (std::vector<Issued>& products : block->async->products) products.clear();
}

// ---- operands

struct Descriptor {
  u32 start, leading, stride, swizzle;
};

static Descriptor decode(u64 bits, Here here) {
  if (bits >> 49 & 7)
    fail(here, "wgmma descriptor %#llx: base offset %llu, tiles here begin at a multiple of their swizzle",
         bits, bits >> 49 & 7);
  constexpr u64 unused = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52;
  if (bits & unused) fail(here, "wgmma descriptor %#llx: bits that must be 0 are set", bits);
  return {static_cast<u32>(bits & 0x3fff) << 4, static_cast<u32>(bits >> 16 & 0x3fff) << 4,
          static_cast<u32>(bits >> 32 & 0x3fff) << 4, static_cast<u32>(bits >> 62)};
}

// Eight numbers of an operand, `chunk` of them along the contiguous axis: (i, chunk) -> shared address.
// contiguous k: i is the row (M or N), chunk counts 8 k.  transposed: i is k, chunk counts 8 rows.
static u32 chunk_address(const Descriptor& d, int i, int chunk, bool transposed) {
  const u32 line = d.swizzle == 1 ? 128 : d.swizzle == 2 ? 64 : 32;
  u32 at = d.start;
  if (d.swizzle == 0) {
    at += transposed ? chunk * d.stride + (i / 8) * d.leading + (i % 8) * 16
                     : (i / 8) * d.stride + chunk * d.leading + (i % 8) * 16;
    return at;
  }
  at += (i / 8) * d.stride + (i % 8) * line;
  if (transposed)
    at += (chunk * 16 / line) * d.leading + chunk * 16 % line;
  else
    at += chunk * 16;
  return swizzled(at, d.swizzle);
}

// matrix[k][row], rows of `width` floats
static void read_operand(Block* block, u64 bits, int rows, bool transposed, bool is_bf16, float* matrix,
                         int width, Here here) {
  const Descriptor d = decode(bits, here);
  const u8* view = block->async->view;
  const u32 limit = block->worker->launch->request.shared_bytes;
  const int n_i = transposed ? 16 : rows, n_chunks = transposed ? rows / 8 : 2;
  for (int i = 0; i < n_i; i++)
    for (int chunk = 0; chunk < n_chunks; chunk++) {
      const u32 at = chunk_address(d, i, chunk, transposed) - shared_window;
      if (at > limit - 16)
        fail(here, "wgmma descriptor %#llx reaches outside the block's %u bytes of shared memory", bits,
             limit);
      u16 numbers[8];
      memcpy(numbers, view + at, 16);
      for (int e = 0; e < 8; e++) {
        const float x = is_bf16 ? bfloat_to_float(numbers[e]) : half_to_float(numbers[e]);
        if (transposed)
          matrix[i * width + 8 * chunk + e] = x;
        else
          matrix[(8 * chunk + e) * width + i] = x;
      }
    }
}

static void read_registers(const Issued& issued, float* matrix) {   // matrix[k][64]
  for (int thread = 0; thread < 128; thread++) {
    const int row = 16 * (thread / 32) + thread % 32 / 4, k = 2 * (thread % 4);
    for (int i = 0; i < 4; i++)
      for (int half = 0; half < 2; half++) {
        const u16 bits = static_cast<u16>(issued.a[thread][i] >> 16 * half);
        matrix[(k + half + 8 * (i / 2)) * 64 + row + 8 * (i % 2)] =
            issued.product.is_bf16 ? bfloat_to_float(bits) : half_to_float(bits);
      }
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
static void multiply(const float* a, const float* b, float* d,
                     int n) {   // d[64][n] = sum over k of a[k][64] b[k][n]
  for (int row = 0; row < 64; row++) {
    float* to = d + row * n;
    for (int column = 0; column < n; column++) to[column] = 0;
    for (int k = 0; k < 16; k++) {
      const float x = a[k * 64 + row];
      const float* from = b + k * n;
      for (int column = 0; column < n; column++) to[column] += x * from[column];
    }
  }
}

// ---- registers that wgmma owns between a fence and its wait

static u64 hash_of(const void* at, u32 n_bytes) {
  u64 hash = 0x9e3779b97f4a7c15ull;
  for (u32 i = 0; i < n_bytes; i += 8) {
    u64 word;
    memcpy(&word, static_cast<const u8*>(at) + i, 8);
    hash = (hash ^ word) * 0x2545f4914f6cdd1dull;
    hash ^= hash >> 29;
  }
  return hash;
}

static void remember(Fiber* fiber, const void* at, u32 n_bytes) {
  for (Known& known : fiber->async->known)
    if (known.at == at && known.n_bytes == n_bytes) {
      known.hash = hash_of(at, n_bytes);
      return;
    }
  fiber->async->known.push_back({at, n_bytes, hash_of(at, n_bytes)});
}

static void check_registers(Fiber* fiber, const void* at, u32 n_bytes, const char* what, Here here) {
  for (const Known& known : fiber->async->known)
    if (known.at == at && known.n_bytes == n_bytes && known.hash != hash_of(at, n_bytes))
      fail(here, "wgmma: registers of %s were written since the last wgmma_fence()", what);
}

void product_fence() {
  Fiber* fiber = current();
  fiber->async->product_fenced = true;
  for (Known& known : fiber->async->known) known.hash = hash_of(known.at, known.n_bytes);
}

// ---- running

static void read_b(Block* block, Issued& issued) {
  const Product& product = issued.product;
  issued.b_rows.resize(16 * product.n_columns);
  read_operand(block, product.b_descriptor, product.n_columns, product.transposed_b, product.is_bf16,
               issued.b_rows.data(), product.n_columns, issued.here);
}

static void read_a(Block* block, Issued& issued, int first_row, int n_rows) {
  const Product& product = issued.product;
  if (product.a != nullptr) return;
  float all[16 * 64];
  read_operand(block, product.a_descriptor, 64, product.transposed_a, product.is_bf16, all, 64, issued.here);
  issued.a_rows.resize(16 * 64);
  for (int k = 0; k < 16; k++)
    memcpy(&issued.a_rows[64 * k + first_row], all + 64 * k + first_row, 4 * n_rows);
}

static void run(Block* block, int group, Issued& issued) {
  const Product& product = issued.product;
  const int n = product.n_columns;
  float d[64 * 256];
  if (product.a != nullptr) {
    issued.a_rows.resize(16 * 64);
    read_registers(issued, issued.a_rows.data());
  }
  multiply(issued.a_rows.data(), issued.b_rows.data(), d, n);
  std::vector<float>().swap(issued.a_rows);
  std::vector<float>().swap(issued.b_rows);
  for (int thread = 0; thread < 128; thread++) {
    const int row = 16 * (thread / 32) + thread % 32 / 4, column = 2 * (thread % 4);
    float* to = issued.d[thread];
    for (int i = 0; i < n / 2; i++) {
      const float x = d[(row + 8 * (i >> 1 & 1)) * n + 8 * (i >> 2) + column + (i & 1)];
      to[i] = product.accumulates ? to[i] + x : x;
    }
    remember(block->fibers[128 * group + thread], to, 2 * n);
  }
  issued.done = true;
  current()->counters->async_shared += 32ull * (n + (product.a == nullptr ? 64 : 0));
  current()->counters->tensor_flops += 2ull * 64 * n * 16;
}

static bool same(const Product& x, const Product& y) {
  return x.a_descriptor == y.a_descriptor && x.b_descriptor == y.b_descriptor && x.n_columns == y.n_columns &&
         x.is_bf16 == y.is_bf16 && x.transposed_a == y.transposed_a && x.transposed_b == y.transposed_b &&
         x.accumulates == y.accumulates && !x.a == !y.a;
}

void product_issue(const Product& product, Here here) {
  Fiber* fiber = current();
  FiberAsync& mine = *fiber->async;
  const int group = fiber->linear / 128;
  if (128 * (group + 1) > fiber->block->n_threads) fail(here, "wgmma needs whole warpgroups of 128 threads");
  if (!mine.product_fenced) fail(here, "wgmma without wgmma_fence() since the start or the last wgmma_wait");
  check_registers(fiber, product.d, 2 * product.n_columns, "D", here);
  if (product.a != nullptr) {
    check_registers(fiber, product.a, 16, "A", here);
    remember(fiber, product.a, 16);
  }
  std::vector<Issued>& products = fiber->block->async->products[group];
  const u64 number = mine.products_issued++;
  if (number == products.size()) {
    products.emplace_back();
    products.back().product = product;
    products.back().here = here;
  }
  Issued& issued = products[number];
  if (!same(issued.product, product))
    fail(here,
         "the threads of a warpgroup issue different wgmma: descriptors and shapes must be equal (the other "
         "at %s(%d))",
         issued.here.file, issued.here.line);
  issued.d[fiber->linear % 128] = product.d;
  issued.a[fiber->linear % 128] = product.a;
  const bool early = fiber->worker->launch->request.late_products == 0;
  const int warp = fiber->linear % 128 / 32;
  if (++issued.of_warp[warp] == 32 && early) {
    if (issued.b_rows.empty()) read_b(fiber->block, issued);
    read_a(fiber->block, issued, 16 * warp, 16);
  }
  if (++issued.n_issued < 128) return;
  if (early) run(fiber->block, group, issued);
  for (int i = 128 * group; i < 128 * (group + 1); i++)
    if (fiber->block->fibers[i]->wait == Wait::products) {
      fiber->block->fibers[i]->wait = Wait::nothing;
      wake(fiber->block->fibers[i]);
    }
}

void product_commit() {
  FiberAsync& mine = *current()->async;
  mine.product_groups.push_back(mine.products_issued);
}

void product_wait(int n_pending, Here here) {
  Fiber* fiber = current();
  FiberAsync& mine = *fiber->async;
  const int group = fiber->linear / 128;
  std::vector<Issued>& products = fiber->block->async->products[group];
  mine.product_fenced = false;
  const i64 n_groups = static_cast<i64>(mine.product_groups.size()) - n_pending;
  const u64 target = n_groups <= 0 ? 0 : mine.product_groups[n_groups - 1];
  for (u64 i = 0; i < target; i++) {
    while (products[i].n_issued < 128) suspend(Wait::products, here);
    if (products[i].done) continue;
    read_b(fiber->block, products[i]);
    read_a(fiber->block, products[i], 0, 64);
    run(fiber->block, group, products[i]);
  }
}

}   // namespace emulated
