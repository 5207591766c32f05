// Tiles of raw dot products S = A B^T, and their masks.
#pragma once
#include "base.cuh"
#include "fragment.cuh"
#include "key_range.cuh"

// S[kRowTiles 16 rows][kCols] of one warp: the stationary operand times kCols rows of a tile in
// shared memory.
template <class Element, int kHeadDim, int kRowTiles, int kCols, class Stationary>
SKL_DEVICE void compute_scores(float (&s)[2 * kRowTiles][kCols / 4], const Stationary& stationary,
                               uint32 tile, const LaneOffset<kHeadDim>& lane) {
    static_assert(kCols % 16 == 0, "one ldmatrix brings two column tiles");
    clear(s);
    SKL_UNROLL
    for (int k = 0; k < kHeadDim / 16; ++k) {
        uint32 a[kRowTiles][4];
        stationary.fetch(a, k);
        SKL_UNROLL
        for (int pair = 0; pair < kCols / 16; ++pair) {
            uint32 b[4];
            ldmatrix_x4(b, lane.address(tile, 16 * pair, k));
            multiply_step<Element, kRowTiles>(s, a, b, pair);
        }
    }
}

// Replaces the logits of keys that a row may not see. first_key is the key of column 0.
template <int kLines, int kElements, class Range, class TileRows>
SKL_DEVICE void mask_scores(float (&s1)[kLines][kElements], float (&s2)[kLines][kElements],
                            const Range& range, const TileRows& rows, int first_key,
                            float masked_logit1, float masked_logit2) {
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        const int query = rows.query(row_of_line(line));
        if constexpr (Range::kIsWindowed) {
            // Positions among this thread's columns: two registers a line, and comparisons with
            // constants.
            const int first_col = first_key + col_of_element(0);
            const int begin = range.begin(query) - first_col, end = range.end(query) - first_col;
            SKL_UNROLL
            for (int e = 0; e < kElements; ++e) {
                const int col = (e >> 1) * 8 + (e & 1);
                if (col < begin || col >= end) {
                    s1[line][e] = masked_logit1;
                    s2[line][e] = masked_logit2;
                }
            }
        } else {
            SKL_UNROLL
            for (int e = 0; e < kElements; ++e) {
                const int key = first_key + col_of_element(e);
                if (key < range.begin(query) || key >= range.end(query)) {
                    s1[line][e] = masked_logit1;
                    s2[line][e] = masked_logit2;
                }
            }
        }
    }
}
