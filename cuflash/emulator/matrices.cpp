// matrices.cpp - ldmatrix, stmatrix, movmatrix and mma.sync.  The last lane to come does the work of the
// warp, so that no lane sees memory that another warp has changed since.
#include "runtime.hpp"

namespace emulated {

struct MatrixSlot {   // one lane's part of ldmatrix or stmatrix
  u32 address, count, transposed, padding;
  u32 registers[4];
  Here here;
};
static_assert(sizeof(MatrixSlot) <= slot_bytes);

static MatrixSlot& matrix_slot(u8* slots, int lane) {
  return *reinterpret_cast<MatrixSlot*>(slots + slot_bytes * lane);
}

// Where the 16-bit number number `half` of register i of `lane` lies: row and column of matrix i.
static u16* element(u8* const* rows, int lane, int half, bool transposed) {
  const int a = lane / 4, b = 2 * (lane % 4) + half;
  return reinterpret_cast<u16*>(transposed ? rows[b] + 2 * a : rows[a] + 2 * b);
}

template <bool stores> static void move_matrices(u8* slots) {
  const MatrixSlot& first = matrix_slot(slots, 0);
  Warp* warp = current()->warp;
  for (u32 i = 0; i < first.count; i++) {
    u8* rows[8];
    for (int row = 0; row < 8; row++) {
      const MatrixSlot& slot = matrix_slot(slots, 8 * i + row);
      rows[row] = shared_pointer(slot.address, 16, 16, slot.here);
      if (stores && current()->worker->launch->request.async_proxy)
        warp->lanes[8 * i + row]->async->touched.push_back({slot.address - shared_window, 16});
    }
    for (int lane = 0; lane < 32; lane++) {
      u16* halves = reinterpret_cast<u16*>(&matrix_slot(slots, lane).registers[i]);
      for (int half = 0; half < 2; half++) {
        u16* there = element(rows, lane, half, first.transposed);
        if (stores)
          *there = halves[half];
        else
          halves[half] = *there;
      }
    }
  }
  current()->counters->shared += 128ull * first.count;
}

void load_matrices(u32* registers, int count, bool transposed, u32 address, Here here) {
  const MatrixSlot mine = {address, static_cast<u32>(count), transposed, 0, {}, here};
  u8* slots = const_cast<u8*>(warp_exchange(transposed ? "ldmatrix.trans" : "ldmatrix", &mine, sizeof mine,
                                            move_matrices<false>, here));
  memcpy(registers, matrix_slot(slots, self->lane).registers, 4 * count);
}

void store_matrices(u32 address, const u32* registers, int count, bool transposed, Here here) {
  MatrixSlot mine = {address, static_cast<u32>(count), transposed, 0, {}, here};
  memcpy(mine.registers, registers, 4 * count);
  warp_exchange(transposed ? "stmatrix.trans" : "stmatrix", &mine, sizeof mine, move_matrices<true>, here);
}

u32 transpose_matrix(u32 mine, Here here) {
  const u8* slots = warp_exchange("movmatrix", &mine, sizeof mine, nullptr, here);
  const int lane = self->lane;
  u32 result = 0;
  for (int half = 0; half < 2; half++) {   // my (row, column) is their (column, row)
    const int row = 2 * (lane % 4) + half, column = lane / 4;
    u32 theirs;
    memcpy(&theirs, slots + slot_bytes * (4 * row + column / 2), 4);
    result |= (theirs >> 16 * (column % 2) & 0xffff) << 16 * half;
  }
  return result;
}

// ---- mma.sync

struct MmaSlot {
  u32 a[4], b[2];
  float d[4];
  u32 kind;
};
static_assert(sizeof(MmaSlot) <= slot_bytes);

static MmaSlot& mma_slot(u8* slots, int lane) {
  return *reinterpret_cast<MmaSlot*>(slots + slot_bytes * lane);
}

static void multiply_warp(u8* slots) {
  const Mma kind = static_cast<Mma>(mma_slot(slots, 0).kind);
  const int depth = kind == Mma::f16_k16 || kind == Mma::bf16_k16 ? 16 : 8;
  float a[16][16], b[16][8];   // a[row][k], b[k][column]
  for (int lane = 0; lane < 32; lane++) {
    const MmaSlot& slot = mma_slot(slots, lane);
    const int g = lane / 4, t = lane % 4;
    if (kind == Mma::tf32_k8) {
      for (int i = 0; i < 4; i++) a[g + 8 * (i % 2)][t + 4 * (i / 2)] = tf32_to_float(slot.a[i]);
      for (int i = 0; i < 2; i++) b[t + 4 * i][g] = tf32_to_float(slot.b[i]);
      continue;
    }
    for (int i = 0; i < depth / 4; i++)
      for (int half = 0; half < 2; half++) {
        const u16 bits = static_cast<u16>(slot.a[i] >> 16 * half);
        a[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] =
            kind == Mma::bf16_k16 ? bfloat_to_float(bits) : half_to_float(bits);
      }
    for (int i = 0; i < depth / 8; i++)
      for (int half = 0; half < 2; half++) {
        const u16 bits = static_cast<u16>(slot.b[i] >> 16 * half);
        b[2 * t + half + 8 * i][g] = kind == Mma::bf16_k16 ? bfloat_to_float(bits) : half_to_float(bits);
      }
  }
  for (int row = 0; row < 16; row++) {
    float sum[8] = {};
    for (int k = 0; k < depth; k++)
      for (int column = 0; column < 8; column++) sum[column] += a[row][k] * b[k][column];
    for (int column = 0; column < 8; column++)
      mma_slot(slots, 4 * (row % 8) + column / 2).d[2 * (row / 8) + column % 2] += sum[column];
  }
  current()->counters->tensor_flops += 2ull * 16 * 8 * depth;
}

void multiply_fragments(Mma kind, float* d, const u32* a, const u32* b, Here here) {
  MmaSlot mine = {};
  memcpy(mine.a, a, kind == Mma::f16_k8 ? 8 : 16);
  memcpy(mine.b, b, kind == Mma::f16_k8 ? 4 : 8);
  memcpy(mine.d, d, 16);
  mine.kind = static_cast<u32>(kind);
  const u8* slots = warp_exchange("mma", &mine, sizeof mine, multiply_warp, here);
  memcpy(d, mma_slot(const_cast<u8*>(slots), self->lane).d, 16);
}

}   // namespace emulated
