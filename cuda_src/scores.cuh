// Tiles of raw dot products S = A B^T, and their masks.
#pragma once
#include "base.cuh"
#include "fragment.cuh"
#include "key_range.cuh"

// S of float32, from three bfloat16 parts of each element. 16 products at a time are summed by the
// matrix units and added to S, rounded to nearest; what the rounding drops joins the smaller parts'
// products, and all of it comes to S at the end.
template <int kHeadDim, int kRowTiles, int kCols, bool kIsTransposed, class Stationary>
SKL_DEVICE void compute_scores_of_parts(float (&s)[2 * kRowTiles][kCols / 4],
                                        const Stationary& stationary, uint32 tile,
                                        const LaneOffset<kHeadDim>& lane) {
    float rest[2 * kRowTiles][kCols / 4];
    clear(s);
    clear(rest);
    // Not unrolled, or splits of later steps crowd the registers.
    SKL_NO_UNROLL
    for (int k = 0; k < kHeadDim / 32; ++k) {
        // Any order of the 16 elements will do that both operands share: two neighbours in a
        // register are 4 columns apart, as ldmatrix leaves them.
        uint32 a[kRowTiles][kParts][4];
        SKL_UNROLL
        for (int half = 0; half < 2; ++half) {
            uint32 whole[kRowTiles][4];
            stationary.fetch(whole, 2 * k + half);
            SKL_UNROLL
            for (int i = 0; i < kRowTiles; ++i) {
                split(a[i], 2 * half, whole[i][0], whole[i][2]);
                split(a[i], 2 * half + 1, whole[i][1], whole[i][3]);
            }
        }
        SKL_UNROLL
        for (int pair = 0; pair < kCols / 16; ++pair) {
            uint32 b[kParts][4];
            SKL_UNROLL
            for (int half = 0; half < 2; ++half) {
                uint32 whole[4];
                ldmatrix_x4(whole, lane.address(tile, 16 * pair, 2 * k + half));
                split(b, half, whole[0], whole[1]);
                split(b, 2 + half, whole[2], whole[3]);
            }
            float step[2 * kRowTiles][4];
            clear(step);
            multiply_parts<kRowTiles, kIsTransposed>(step, rest, a, b, pair);
            SKL_UNROLL
            for (int line = 0; line < 2 * kRowTiles; ++line) {
                SKL_UNROLL
                for (int e = 0; e < 4; ++e) {
                    float &sum = s[line][4 * pair + e], before = sum;
                    sum += step[line][e];
                    rest[line][4 * pair + e] += step[line][e] - (sum - before);
                }
            }
        }
    }
    SKL_UNROLL
    for (int line = 0; line < 2 * kRowTiles; ++line) {
        SKL_UNROLL
        for (int e = 0; e < kCols / 4; ++e) {
            // Beside an Inf the smaller parts are NaN.
            const bool is_infinite = fabsf(s[line][e]) == __int_as_float(0x7f800000);
            s[line][e] += is_infinite ? 0.f : rest[line][e];
        }
    }
}

// S[kRowTiles 16 rows][kCols] of one warp: the stationary operand times kCols rows of a tile in
// shared memory. kIsTransposed: the rows are keys. A logit then has the bits that it has elsewhere,
// or a probability of 1 would differ from what its log-sum-exp says.
template <class Element, int kHeadDim, int kRowTiles, int kCols, bool kIsTransposed = false,
          class Stationary>
SKL_DEVICE void compute_scores(float (&s)[2 * kRowTiles][kCols / 4], const Stationary& stationary,
                               uint32 tile, const LaneOffset<kHeadDim>& lane) {
    static_assert(kCols % 16 == 0, "one ldmatrix brings two column tiles");
    if constexpr (is_same<Element, fp32>) {
        compute_scores_of_parts<kHeadDim, kRowTiles, kCols, kIsTransposed>(s, stationary, tile,
                                                                           lane);
    } else {
        clear(s);
        SKL_UNROLL
        for (int k = 0; k < kHeadDim / 16; ++k) {
            uint32 a[kRowTiles][4];
            stationary.fetch(a, k);
            if constexpr (is_same<Element, tf32>) {
                SKL_UNROLL
                for (int i = 0; i < kRowTiles; ++i) round_to_tf32(a[i]);
            }
            SKL_UNROLL
            for (int pair = 0; pair < kCols / 16; ++pair) {
                uint32 b[4];
                ldmatrix_x4(b, lane.address(tile, 16 * pair, k));
                if constexpr (is_same<Element, tf32>) round_to_tf32(b);
                multiply_step<Element, kRowTiles>(s, a, b, pair);
            }
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
