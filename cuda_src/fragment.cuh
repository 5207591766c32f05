// Who holds what in an mma.sync m16n8k16, and the fragments' way from shared memory to registers.
// Head dimensions are in units of 16 bits (smem.cuh): of m16n8k8, whose elements have 4 bytes,
// ldmatrix brings the fragments just so.
//
// A thread of a warp holds, of a 16x8 accumulator, columns 2 (lane % 4) + {0, 1} of rows lane / 4
// and lane / 4 + 8. Here an accumulator of kRowTiles x (kCols / 8) such tiles is float [2
// kRowTiles][kCols / 4]: one line per row the thread owns.
#pragma once
#include "base.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "smem.cuh"

SKL_DEVICE int lane_id() { return threadIdx.x & 31; }
SKL_DEVICE int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); }

// The row (of 16 kRowTiles) behind line `line` of the thread's accumulators.
SKL_DEVICE int row_of_line(int line) {
    return (line >> 1) * 16 + (line & 1) * 8 + (lane_id() >> 2);
}
// The column behind element `element` of a line.
SKL_DEVICE int col_of_element(int element) {
    return (element >> 1) * 8 + (element & 1) + 2 * (lane_id() & 3);
}

// Where a lane points for each kind of operand stored as [row][head_dim]:
//   A (rows are M, head_dim is K), and B read transposed (rows are K, head_dim is N): the same
//   walk, B (rows are N, head_dim is K).
template <int kHeadDim>
SKL_DEVICE LaneOffset<kHeadDim> lane_offset_a() {
    return {lane_id() & 15, lane_id() >> 4};
}
template <int kHeadDim>
SKL_DEVICE LaneOffset<kHeadDim> lane_offset_b() {
    return {(lane_id() & 7) + 8 * (lane_id() >> 4), (lane_id() >> 3) & 1};
}

// A operand of kRowTiles x 16 rows kept in registers for the life of the block.
template <int kHeadDim, int kRowTiles>
struct StationaryRegisters {
    uint32 a[kHeadDim / 16][kRowTiles][4];

    SKL_DEVICE void load(uint32 tile) {
        const LaneOffset<kHeadDim> lane = lane_offset_a<kHeadDim>();
        SKL_UNROLL
        for (int k = 0; k < kHeadDim / 16; ++k) {
            SKL_UNROLL
            for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4(a[k][i], lane.address(tile, 16 * i, k));
        }
    }
    SKL_DEVICE void fetch(uint32 (&fragment)[kRowTiles][4], int k) const {
        SKL_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
            SKL_UNROLL
            for (int j = 0; j < 4; ++j) fragment[i][j] = a[k][i][j];
        }
    }
};

// The same operand left in shared memory and read for every use.
template <int kHeadDim, int kRowTiles>
struct StationaryShared {
    LaneOffset<kHeadDim> lane = lane_offset_a<kHeadDim>();
    uint32 tile;

    SKL_DEVICE void load(uint32 address) { tile = address; }
    SKL_DEVICE void fetch(uint32 (&fragment)[kRowTiles][4], int k) const {
        SKL_UNROLL
        for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4(fragment[i], lane.address(tile, 16 * i, k));
    }
};

template <int kLines, int kElements>
SKL_DEVICE void clear(float (&accumulator)[kLines][kElements]) {
    SKL_UNROLL
    for (int i = 0; i < kLines; ++i) {
        SKL_UNROLL
        for (int j = 0; j < kElements; ++j) accumulator[i][j] = 0.f;
    }
}

// Multiplies the fragments of one k step of 16 (8 of tf32) by two neighbouring column tiles of B.
template <class Element, int kRowTiles, int kElements>
SKL_DEVICE void multiply_step(float (&accumulator)[2 * kRowTiles][kElements],
                              const uint32 (&a)[kRowTiles][4], const uint32 (&b)[4], int col_pair) {
    SKL_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
        SKL_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int e = 4 * col_pair + 2 * half;
            float &d0 = accumulator[2 * i][e], &d1 = accumulator[2 * i][e + 1];
            float &d2 = accumulator[2 * i + 1][e], &d3 = accumulator[2 * i + 1][e + 1];
            if constexpr (is_same<Element, tf32>) {
                mma_m16n8k8(d0, d1, d2, d3, a[i], b[2 * half], b[2 * half + 1]);
            } else {
                mma_m16n8k16<Element>(d0, d1, d2, d3, a[i], b[2 * half], b[2 * half + 1]);
            }
        }
    }
}

// Two lines of an accumulator, columns 16 col_pair .. + 15, as an A operand.
template <class Element, int kElements>
SKL_DEVICE void pack_a(uint32 (&a)[4], const float (&line0)[kElements],
                       const float (&line1)[kElements], int col_pair) {
    const int e = 4 * col_pair;
    a[0] = pack<Element>(line0[e], line0[e + 1]);
    a[1] = pack<Element>(line1[e], line1[e + 1]);
    a[2] = pack<Element>(line0[e + 2], line0[e + 3]);
    a[3] = pack<Element>(line1[e + 2], line1[e + 3]);
}

// Rounds to the 11 significant bits that the matrix units read, ties away from zero: half a unit is
// added, and they cut. Inf and NaN stay what they are, which an integer sum would not grant.
SKL_DEVICE uint32 round_to_tf32(uint32 bits) {
    const float power = __uint_as_float(bits & 0xff800000u);
    return __float_as_uint(fmaf(power, 0x1p-11f, __uint_as_float(bits)));
}
template <int kCount>
SKL_DEVICE void round_to_tf32(uint32 (&bits)[kCount]) {
    SKL_UNROLL
    for (int i = 0; i < kCount; ++i) bits[i] = round_to_tf32(bits[i]);
}

// A float is the sum of three bfloat16, exactly: each takes the nearest to what is left. A product
// of two floats is then the sum of nine, of which the three smallest, 2^-26 of it, are left out.
inline constexpr int kParts = 3;

// Two floats as a register for each part. What is left of an Inf is NaN.
SKL_DEVICE void split(uint32 (&a)[kParts][4], int idx, float low, float high) {
    SKL_UNROLL
    for (int part = 0; part < kParts - 1; ++part) {
        const uint32 packed = pack<bf16>(low, high);
        a[part][idx] = packed;
        low -= __uint_as_float(packed << 16);
        high -= __uint_as_float(packed & 0xffff0000u);
    }
    // What is left are bfloat16 as they are.
    a[kParts - 1][idx] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
SKL_DEVICE void split(uint32 (&a)[kParts][4], int idx, uint32 low, uint32 high) {
    split(a, idx, __uint_as_float(low), __uint_as_float(high));
}

// The product of the first parts of one k step of 16 and two neighbouring column tiles, and the
// smaller ones, which add to another accumulator. The matrix units cut what they sum instead of
// rounding it: no more than these 16 products may meet in `first`, or the cuts add up. It holds the
// two column tiles alone. kIsTransposed: what is B elsewhere is A here, and the same bits come out.
template <int kRowTiles, bool kIsTransposed, int kElements>
SKL_DEVICE void multiply_parts(float (&first)[2 * kRowTiles][4],
                               float (&rest)[2 * kRowTiles][kElements],
                               const uint32 (&a)[kRowTiles][kParts][4],
                               const uint32 (&b)[kParts][4], int col_pair) {
    // The smallest first.
    constexpr int kOfA[] = {2, 0, 1, 1, 0, 0}, kOfB[] = {0, 2, 1, 0, 1, 0};
    SKL_UNROLL
    for (int product = 0; product <= 5; ++product) {
        uint32 part[kRowTiles][4];
        SKL_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
            SKL_UNROLL
            for (int j = 0; j < 4; ++j) {
                const int of_a = kIsTransposed ? kOfB[product] : kOfA[product];
                part[i][j] = a[i][of_a][j];
            }
        }
        if (product == 5) {
            multiply_step<bf16, kRowTiles>(first, part, b[0], 0);
        } else {
            const int of_b = kIsTransposed ? kOfA[product] : kOfB[product];
            multiply_step<bf16, kRowTiles>(rest, part, b[of_b], col_pair);
        }
    }
}
