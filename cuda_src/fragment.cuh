// Who holds what in an mma.sync m16n8k16, and the fragments' way from shared memory to registers.
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

// Multiplies the fragments of one k step of 16 by two neighbouring column tiles of B.
template <class Element, int kRowTiles, int kElements>
SKL_DEVICE void multiply_step(float (&accumulator)[2 * kRowTiles][kElements],
                              const uint32 (&a)[kRowTiles][4], const uint32 (&b)[4], int col_pair) {
    SKL_UNROLL
    for (int i = 0; i < kRowTiles; ++i) {
        SKL_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int e = 4 * col_pair + 2 * half;
            mma_m16n8k16<Element>(accumulator[2 * i][e], accumulator[2 * i][e + 1],
                                  accumulator[2 * i + 1][e], accumulator[2 * i + 1][e + 1], a[i],
                                  b[2 * half], b[2 * half + 1]);
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
