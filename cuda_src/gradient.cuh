// The gradients with respect to the logits of a tile (row_statistics.cuh), and their way into the
// matrix units.
#pragma once
#include "base.cuh"
#include "fragment.cuh"
#include "key_range.cuh"
#include "row_statistics.cuh"

// Logit gradients are rounded to the element type on their way into the third product. bfloat16 has
// the exponents of float32; float16 would underflow, so there they are multiplied by a power of
// two: one for the whole call from the largest |dkl| (call_factor); for side 1, whose ds has no
// bound of its own, a warp or block lowers it when a value would overflow.
inline constexpr float kFp16Limit = 32768.f;

template <class Element>
SKL_DEVICE float call_factor(const uint32* max_dkl) {
    if constexpr (!is_same<Element, fp16>) return 1.f;
    const int exponent = static_cast<int>(*max_dkl >> 23) - 127;
    // max |dkl| times the factor lies in [2^14, 2^15). A zero or denormal maximum takes the largest
    // factor.
    return __int_as_float((min_of(14 - exponent, 120) + 127) << 23);
}

template <class Element, int kSide>
inline constexpr bool kNeedsRunningFactor = is_same<Element, fp16> && kSide == 1;

template <int kLines, int kElements>
SKL_DEVICE float largest_magnitude(const float (&ds)[kLines][kElements]) {
    float largest = 0.f;
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        SKL_UNROLL
        for (int e = 0; e < kElements; ++e) largest = fmaxf(largest, fabsf(ds[line][e]));
    }
    return largest;
}

// The power of two, at most 1, that brings a largest magnitude under the limit. Infinities are left
// to be infinities.
SKL_DEVICE float shrink_to_limit(float largest) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    return exponent > 127 ? 1.f : __int_as_float((min_of(0, 14 - exponent) + 127) << 23);
}

template <int kLines, int kElements>
SKL_DEVICE void multiply(float (&values)[kLines][kElements], float factor) {
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        SKL_UNROLL
        for (int e = 0; e < kElements; ++e) values[line][e] *= factor;
    }
}

SKL_DEVICE float warp_max(float value) {
    SKL_UNROLL
    for (int distance = 16; distance >= 1; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// Lowers the warp's factor if ds, which carries it, would overflow float16; what was summed so far
// follows.
template <int kLines, int kElements, int kSummed>
SKL_DEVICE void fit_to_fp16(float (&ds)[kLines][kElements], float (&summed)[kLines][kSummed],
                            float& factor) {
    const float largest = largest_magnitude(ds);
    if (!__any_sync(~0u, largest > kFp16Limit)) return;
    const float shrink = shrink_to_limit(warp_max(largest));
    multiply(ds, shrink);
    multiply(summed, shrink);
    factor *= shrink;
}

SKL_DEVICE bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

// Zeroes the elements of a register, one float or a packed pair, that are infinite or NaN.
template <class Element>
SKL_DEVICE uint32 finite_or_zero(uint32 packed) {
    if constexpr (kUnits<Element> == 2) return is_finite(__uint_as_float(packed)) ? packed : 0u;
    constexpr uint32 kExponent = is_same<Element, bf16> ? 0x7f80u : 0x7c00u;
    if ((packed & kExponent) == kExponent) packed &= 0xffff0000u;
    if ((packed >> 16 & kExponent) == kExponent) packed &= 0x0000ffffu;
    return packed;
}

// Zeroes dS where the row may not see the key. A key's own NaN or Inf must stay in the rows that
// see it: those are marked with NaN here, and what the product reads of the key must be scrubbed if
// this returns true. trained are the logits of the side that gets gradients.
template <int kLines, int kElements, class Range>
SKL_DEVICE bool mask_gradients(float (&ds)[kLines][kElements],
                               const float (&trained)[kLines][kElements], const Range& range,
                               int first_query, int first_key) {
    bool leaks = false;
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        const int query = first_query + row_of_line(line);
        SKL_UNROLL
        for (int e = 0; e < kElements; ++e) {
            const int key = first_key + col_of_element(e);
            const bool is_visible = key >= range.begin(query) && key < range.end(query);
            const bool is_broken = !is_finite(trained[line][e]);
            leaks |= is_broken;
            ds[line][e] = !is_visible ? 0.f : is_broken ? __int_as_float(0x7fffffff) : ds[line][e];
        }
    }
    return leaks;
}

// Zeroes dS^T where the query does not exist or may not see the key. Returns whether a masked query
// may hold a NaN or Inf, which must be scrubbed before dS^T multiplies it. One that sees any key
// has NaN for statistics then, and with them for all of its dS^T, so that no logit has to outlive
// its gradient; one that sees none shows nothing and counts as if it did.
template <int kLines, int kElements, class Range>
SKL_DEVICE bool mask_transposed(float (&ds)[kLines][kElements], const Range& range, int first_key,
                                int first_query) {
    bool leaks = false;
    const int first_col = first_query + col_of_element(0);  // of this thread
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        // The queries that see a key are an interval, too.
        int key = first_key + row_of_line(line);
        if constexpr (Range::kIsRagged) pin(key);  // one look at the table after the other
        const Interval queries = key < range.num_keys ? range.queries_of(key, key) : Interval{0, 0};
        const int begin = queries.begin - first_col, end = queries.end - first_col;
        SKL_UNROLL
        for (int e = 0; e < kElements; ++e) {
            const int col = (e >> 1) * 8 + (e & 1);
            const bool is_visible = col >= begin && col < end;
            leaks |= !is_visible && !is_finite(ds[line][e]);
            ds[line][e] = is_visible ? ds[line][e] : 0.f;
        }
    }
    if constexpr (Range::kIsRagged) {
        // They may lie anywhere; the lanes of a warp look at a few each.
        SKL_NO_UNROLL
        for (int col = lane_id(); col < 4 * kElements; col += 32) {
            leaks |= range.is_empty(first_query + col);
        }
        return leaks;
    } else {
        const int last_col = first_col + (kElements - 1) / 2 * 8 + 1;
        return leaks || range.has_empty(first_col, last_col);
    }
}

// Where a lane finds its elements of a tile of 4-byte elements whose rows are contracted: of rows
// 2 (lane % 4) + {0, 1} + 8 a the neighbouring columns 2 (lane / 4) + {0, 1} of each 16. One goes
// to the first of two column tiles, one to the second, so that column n of the tiles is column 2 n
// and 2 n + 1 of the sums. Neither bank conflicts nor shuffles.
template <int kHeadDim>
struct ContractedRows {
    LaneOffset<2 * kHeadDim> lane{2 * (lane_id() & 3), lane_id() >> 3};

    SKL_DEVICE ContractedRows() { lane.first += (lane_id() >> 2 & 1) * 8; }  // half a chunk
    SKL_DEVICE void fetch(uint32 (&columns)[2], uint32 tile, int row, int parity, int pair) const {
        // An odd row permutes its chunks by one bit more than the even one before it.
        const uint32 even = lane.address(tile, row, 2 * pair);
        load_shared_64(columns, (even ^ (parity * 16)) + parity * 4 * kHeadDim);
    }
};

template <class Element, int kHeadDim>
SKL_DEVICE auto lane_of_summed() {
    if constexpr (kUnits<Element> == 2) {
        return ContractedRows<kHeadDim>{};
    } else {
        return lane_offset_a<kHeadDim>();
    }
}

// The column of the sums behind elements 4 pair .. + 3 of a line of 4-byte elements, which are
// neighbours: tile j holds the columns 2 n + j.
SKL_DEVICE int first_col_of_pair(int pair) { return 16 * pair + 4 * (lane_id() & 3); }

template <int kHeadDim, int kRowTiles, int kCols, bool kScrub>
SKL_DEVICE void add_product_of_tf32(float (&summed)[2 * kRowTiles][kHeadDim / 4],
                                    const float (&ds)[2 * kRowTiles][kCols / 4], uint32 tile,
                                    const ContractedRows<kHeadDim>& lane) {
    SKL_UNROLL
    for (int k = 0; k < kCols / 8; ++k) {
        // The accumulator's columns 2 t and 2 t + 1 are contracted as t and t + 4.
        uint32 a[kRowTiles][4];
        SKL_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
            SKL_UNROLL
            for (int j = 0; j < 4; ++j)
                a[i][j] = round_to_tf32(__float_as_uint(ds[2 * i + j % 2][2 * k + j / 2]));
        }
        SKL_UNROLL
        for (int pair = 0; pair < kHeadDim / 16; ++pair) {
            uint32 even[2], odd[2];
            lane.fetch(even, tile, 8 * k, 0, pair);
            lane.fetch(odd, tile, 8 * k, 1, pair);
            uint32 b[4] = {even[0], odd[0], even[1], odd[1]};
            if constexpr (kScrub) {
                SKL_UNROLL
                for (int j = 0; j < 4; ++j) b[j] = finite_or_zero<tf32>(b[j]);
            }
            round_to_tf32(b);
            multiply_step<tf32, kRowTiles>(summed, a, b, pair);
        }
    }
}

template <int kHeadDim, int kRowTiles, int kCols, bool kScrub>
SKL_DEVICE void add_product_of_parts(float (&summed)[2 * kRowTiles][kHeadDim / 4],
                                     const float (&ds)[2 * kRowTiles][kCols / 4], uint32 tile,
                                     const ContractedRows<kHeadDim>& lane) {
    uint32 a[kCols / 16][kRowTiles][kParts][4];
    SKL_UNROLL
    for (int k = 0; k < kCols / 16; ++k) {
        SKL_UNROLL
        for (int i = 0; i < kRowTiles; ++i) {
            SKL_UNROLL
            for (int j = 0; j < 4; ++j) {
                const float* neighbours = &ds[2 * i + j % 2][4 * k + 2 * (j / 2)];
                split(a[k][i], j, neighbours[0], neighbours[1]);
            }
        }
    }
    SKL_UNROLL
    for (int pair = 0; pair < kHeadDim / 16; ++pair) {
        float rest[2 * kRowTiles][4];
        clear(rest);
        SKL_UNROLL
        for (int k = 0; k < kCols / 16; ++k) {
            uint32 b[kParts][4];
            SKL_UNROLL
            for (int half = 0; half < 2; ++half) {
                uint32 even[2], odd[2];
                lane.fetch(even, tile, 16 * k + 8 * half, 0, pair);
                lane.fetch(odd, tile, 16 * k + 8 * half, 1, pair);
                SKL_UNROLL
                for (int j = 0; j < 2; ++j) {
                    if constexpr (kScrub) {
                        even[j] = finite_or_zero<fp32>(even[j]);
                        odd[j] = finite_or_zero<fp32>(odd[j]);
                    }
                    split(b, 2 * j + half, even[j], odd[j]);
                }
            }
            float step[2 * kRowTiles][4];
            clear(step);
            multiply_parts<kRowTiles, false>(step, rest, a[k], b, 0);
            SKL_UNROLL
            for (int line = 0; line < 2 * kRowTiles; ++line) {
                SKL_UNROLL
                for (int e = 0; e < 4; ++e) summed[line][4 * pair + e] += step[line][e];
            }
        }
        SKL_UNROLL
        for (int line = 0; line < 2 * kRowTiles; ++line) {
            SKL_UNROLL
            for (int e = 0; e < 4; ++e) summed[line][4 * pair + e] += rest[line][e];
        }
    }
}

// summed[rows][kHeadDim] += ds[rows][kCols] times kCols rows of a tile in shared memory. kScrub:
// rows of the tile that are masked for some of ours may hold NaN or Inf, which a zero in ds would
// not keep out.
template <class Element, int kHeadDim, int kRowTiles, int kCols, bool kScrub, class Lane>
SKL_DEVICE void add_product(float (&summed)[2 * kRowTiles][kHeadDim / 4],
                            const float (&ds)[2 * kRowTiles][kCols / 4], uint32 tile,
                            const Lane& lane) {
    if constexpr (is_same<Element, fp32>) {
        add_product_of_parts<kHeadDim, kRowTiles, kCols, kScrub>(summed, ds, tile, lane);
    } else if constexpr (is_same<Element, tf32>) {
        add_product_of_tf32<kHeadDim, kRowTiles, kCols, kScrub>(summed, ds, tile, lane);
    } else {
        SKL_UNROLL
        for (int k = 0; k < kCols / 16; ++k) {
            uint32 a[kRowTiles][4];
            SKL_UNROLL
            for (int i = 0; i < kRowTiles; ++i) pack_a<Element>(a[i], ds[2 * i], ds[2 * i + 1], k);
            SKL_UNROLL
            for (int pair = 0; pair < kHeadDim / 16; ++pair) {
                uint32 b[4];
                ldmatrix_x4_trans(b, lane.address(tile, 16 * k, pair));
                if constexpr (kScrub) {
                    SKL_UNROLL
                    for (int j = 0; j < 4; ++j) b[j] = finite_or_zero<Element>(b[j]);
                }
                multiply_step<Element, kRowTiles>(summed, a, b, pair);
            }
        }
    }
}

// A sum of thousands of tiles loses two digits if each is rounded into it. At float32 accuracy so
// many columns are summed before they join the caller's array, which begins anew.
inline constexpr int kSummedCols = 512;

// Writes accumulators as rows [first_row, ...) of one head of a gradient, rounded to the element
// type. Where elements have 4 bytes, `adds` says whether they join what is there.
template <class Element, int kLines, int kElements>
SKL_DEVICE void store_gradient(void* gradient, int64 head_offset, int64 row_stride, int first_row,
                               int num_rows, int head_dim, const float (&values)[kLines][kElements],
                               const float (&factor)[kLines], bool adds = false) {
    if constexpr (kUnits<Element> == 2) {
        // Pinned, or the addresses are computed ahead of the loop that sums and crowd it.
        pin(first_row);
        pin(head_dim);
        float* head = static_cast<float*>(gradient) + head_offset;
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            const int row = first_row + row_of_line(line);
            if (row >= num_rows) continue;
            SKL_UNROLL
            for (int pair = 0; pair < kElements / 4; ++pair) {
                const int col = first_col_of_pair(pair);
                if (col >= head_dim) continue;
                const float *four = &values[line][4 * pair], by = factor[line];
                float* at = head + row * row_stride + col;
                if (adds) {
                    // Nobody else adds here, so the order is fixed; and no register waits for what
                    // was there.
                    reduce_add_global(at, four[0] * by, four[2] * by, four[1] * by, four[3] * by);
                } else {
                    *reinterpret_cast<float4*>(at) =
                        float4{four[0] * by, four[2] * by, four[1] * by, four[3] * by};
                }
            }
        }
        return;
    }
    uint16* head = static_cast<uint16*>(gradient) + head_offset;
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        const int row = first_row + row_of_line(line);
        if (row >= num_rows) continue;
        SKL_UNROLL
        for (int e = 0; e < kElements; e += 2) {
            const int col = col_of_element(e);
            if (col < head_dim) {
                *reinterpret_cast<uint32*>(head + row * row_stride + col) = pack<Element>(
                    values[line][e] * factor[line], values[line][e + 1] * factor[line]);
            }
        }
    }
}
