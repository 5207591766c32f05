// mma.sync with float32 accumulators (sm_80 and up).
#pragma once
#include "../base.cuh"

// d[0..1] belong to the thread's first row, d[2..3] to the row eight below.
template <class Element>
SKL_DEVICE void mma_m16n8k16(float& d0, float& d1, float& d2, float& d3, const uint32 (&a)[4],
                             uint32 b0, uint32 b1) {
    if constexpr (is_same<Element, bf16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The same for elements of 4 bytes, of which the matrix units read the upper 19 bits.
SKL_DEVICE void mma_m16n8k8(float& d0, float& d1, float& d2, float& d3, const uint32 (&a)[4],
                            uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats, rounded to nearest even, as one register: the first in the low half.
template <class Element>
SKL_DEVICE uint32 pack(float low, float high) {
    uint32 packed;
    if constexpr (is_same<Element, bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
}

// Both halves of a register of float16, times those of another.
SKL_DEVICE uint32 multiply_fp16x2(uint32 a, uint32 b) {
    uint32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
