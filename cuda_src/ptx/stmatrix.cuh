// stmatrix: four 8x8 matrices of 16-bit elements to shared memory, lane i giving the address of row
// i % 8 of matrix i / 8 (sm_90).
#pragma once
#include "../base.cuh"

SKL_DEVICE void stmatrix_x4(uint32 address, const uint32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Each matrix transposed: the rows that lanes give addresses of are its columns.
SKL_DEVICE void stmatrix_x4_trans(uint32 address, const uint32 (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}
