// ldmatrix.cuh - 8 x 8 matrices of 16-bit numbers between shared memory and the registers of a warp.
//
// A matrix is 8 rows of 16 bytes.  Lane l gives the address of row l % 8 of matrix l / 8 (x1 uses lanes 0 to
// 7, x2 lanes 0 to 15).  Register i of lane l holds, of matrix i, row l / 4, columns 2 (l % 4) and + 1, the
// lower column in the low half; with trans, column l / 4, rows 2 (l % 4) and + 1.  These are the operand
// layouts of mma.sync and wgmma.
#pragma once
#include "platform.cuh"

#ifdef CUFLASH_EMULATED
#define WHERE , emulated::Here here = emulated::Here::now()
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address WHERE) {
  emulated::load_matrices(r, 4, false, address, here);
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address WHERE) {
  emulated::load_matrices(r, 4, true, address, here);
}
DEVICE void ldmatrix_x2(u32 (&r)[2], u32 address WHERE) {
  emulated::load_matrices(r, 2, false, address, here);
}
DEVICE void ldmatrix_x2_trans(u32 (&r)[2], u32 address WHERE) {
  emulated::load_matrices(r, 2, true, address, here);
}
DEVICE void ldmatrix_x1(u32& r, u32 address WHERE) { emulated::load_matrices(&r, 1, false, address, here); }
DEVICE void ldmatrix_x1_trans(u32& r, u32 address WHERE) {
  emulated::load_matrices(&r, 1, true, address, here);
}
DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4] WHERE) {
  emulated::store_matrices(address, r, 4, false, here);
}
DEVICE void stmatrix_x4_trans(u32 address, const u32 (&r)[4] WHERE) {
  emulated::store_matrices(address, r, 4, true, here);
}
DEVICE void stmatrix_x2(u32 address, const u32 (&r)[2] WHERE) {
  emulated::store_matrices(address, r, 2, false, here);
}
DEVICE void stmatrix_x2_trans(u32 address, const u32 (&r)[2] WHERE) {
  emulated::store_matrices(address, r, 2, true, here);
}
DEVICE u32 movmatrix(u32 x WHERE) { return emulated::transpose_matrix(x, here); }
#undef WHERE
#else
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_x2(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_x2_trans(u32 (&r)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_x1(u32& r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x1_trans(u32& r, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(address)
               : "memory");
}
// The reverse, with the same lanes and layouts.   sm_90 and later
DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
DEVICE void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
DEVICE void stmatrix_x2(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
               : "memory");
}
DEVICE void stmatrix_x2_trans(u32 address, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]),
               "r"(r[1])
               : "memory");
}
// Transposes an 8 x 8 matrix that lies in one register of each lane.
DEVICE u32 movmatrix(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#endif
