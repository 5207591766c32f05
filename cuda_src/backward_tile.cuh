// What the backward kernels share: their shared memory (two stationary tiles, one of each side, and a ring of pairs of streamed
// tiles; queries are stationary for dQ, keys for dK and in the fused kernel) and the walk of a block of keys over its queries.
#pragma once
#include "base.cuh"
#include "gradient.cuh"
#include "params.cuh"
#include "smem.cuh"

template <int kSide, int kHeadDim1, int kHeadDim2, int kRowTiles, int kNumWarps_, int kBlockCols, int kNumStages>
struct BackwardTile {
    static constexpr int kHeadDim = kSide == 1 ? kHeadDim1 : kHeadDim2;  // of the side that gets gradients
    static constexpr int kNumWarps = kNumWarps_, kNumThreads = 32 * kNumWarps;
    static constexpr int kRowsPerWarp = 16 * kRowTiles, kBlockRows = kRowsPerWarp * kNumWarps;
    static_assert(kNumStages >= 2, "the next tile is under way while one is used");

    static constexpr int kStationary1Bytes = kBlockRows * kHeadDim1 * 2;
    static constexpr int kStationaryBytes = kStationary1Bytes + kBlockRows * kHeadDim2 * 2;
    static constexpr int kStreamed1Bytes = kBlockCols * kHeadDim1 * 2;
    static constexpr int kStageBytes = kStreamed1Bytes + kBlockCols * kHeadDim2 * 2;
};

// What belongs to the query rows of a tile.
template <int kBlockQ>
struct RowsOfTile {
    RowStatistics statistics[kBlockQ];
    float dkl[kBlockQ];
};

// Starts the copy of the rows [first_query, first_query + kBlockQ) of one head. Rows that do not exist read as zero.
template <int kBlockQ>
SKL_DEVICE void load_rows(uint32 destination, const BackwardParams& params, int batch_idx, int head_idx, int first_query) {
    const int idx = threadIdx.x;
    if (idx >= kBlockQ) return;
    const int query = first_query + idx;
    const bool is_inside = query < params.range.num_queries;
    const int64 row = (static_cast<int64>(batch_idx) * params.num_heads + head_idx) * params.range.num_queries + query;
    const int64 at = batch_idx * params.dkl_rows.batch_stride + head_idx * params.dkl_rows.head_stride +
                     query * params.dkl_rows.row_stride;
    cp_async_16(destination + idx * static_cast<int>(sizeof(RowStatistics)), params.row_statistics + (is_inside ? 4 * row : 0),
                is_inside);
    cp_async_4(destination + kBlockQ * static_cast<int>(sizeof(RowStatistics)) + idx * 4,
               params.dkl + (is_inside ? at : 0), is_inside);
}

struct QueryTile {
    int head_idx, first_query;
};

// A block of the key-stationary kernels: one key head of side kSide, its group of query heads, kBlockRows keys. It lives in
// shared memory: the registers belong to the accumulators.
template <class Tile_, int kSide, int kHeadDim1, int kHeadDim2, int kBlockQ, bool kIsAligned>
struct KeyBlock {
    using Tile = Tile_;
    static constexpr int kStageBytes = Tile::kStageBytes + static_cast<int>(sizeof(RowsOfTile<kBlockQ>));

    int batch_idx, key_head_idx, first_key;
    int head_begin, head_end;    // query heads of the group
    int query_begin, query_end;  // the queries that see any of the keys, from the start of a tile on

    SKL_DEVICE void init(const BackwardParams& params) {
        const int group = kSide == 1 ? params.group1 : params.group2;
        const int num_key_heads = params.num_heads / group;
        const int key_head_of_batch = blockIdx.x / params.num_blocks;
        batch_idx = key_head_of_batch / num_key_heads;
        key_head_idx = key_head_of_batch % num_key_heads;
        first_key = blockIdx.x % params.num_blocks * Tile::kBlockRows;
        const Interval queries = params.range.queries_of(first_key, first_key + Tile::kBlockRows - 1);
        query_begin = queries.begin / kBlockQ * kBlockQ;
        query_end = queries.end;
        head_begin = key_head_idx * group;
        head_end = queries.begin < queries.end ? head_begin + group : head_begin;
    }

    // The walk: tile after tile of a head, head after head of the group.
    SKL_DEVICE QueryTile first_tile() const { return {head_begin, query_begin}; }
    SKL_DEVICE bool is_past(QueryTile tile) const { return tile.head_idx >= head_end; }
    SKL_DEVICE QueryTile next(QueryTile tile) const {
        tile.first_query += kBlockQ;
        return tile.first_query < query_end ? tile : QueryTile{tile.head_idx + 1, query_begin};
    }

    // Heads of the group may differ in the key head of the other side.
    SKL_DEVICE bool exchanges_keys(const BackwardParams& params, QueryTile tile) const {
        const int other_group = kSide == 1 ? params.group2 : params.group1;
        return tile.first_query == query_begin && tile.head_idx > head_begin && tile.head_idx % other_group == 0;
    }
    template <int kWhich>
    SKL_DEVICE void load_keys(const BackwardParams& params, uint32 tile, int head_idx) const {
        constexpr int kHeadDim = kWhich == 1 ? kHeadDim1 : kHeadDim2;
        const int key_head = head_idx / (kWhich == 1 ? params.group1 : params.group2);
        load_tile<Tile::kBlockRows, kHeadDim, Tile::kNumThreads, kIsAligned>(
            tile,
            rows_of_head(kWhich == 1 ? params.k1 : params.k2, batch_idx, key_head, params.range.num_keys,
                         kWhich == 1 ? params.head_dim1 : params.head_dim2),
            first_key);
    }
    // A tile of queries with its rows, as one group of copies; an empty group behind the last tile, so that the count of
    // pending groups stays the same.
    SKL_DEVICE void load_queries(const BackwardParams& params, QueryTile tile, uint32 sStage) const {
        if (!is_past(tile)) {
            const auto [head_idx, first_query] = tile;
            const int num_queries = params.range.num_queries;
            load_tile<kBlockQ, kHeadDim1, Tile::kNumThreads, kIsAligned>(
                sStage, rows_of_head(params.q1, batch_idx, head_idx, num_queries, params.head_dim1), first_query);
            load_tile<kBlockQ, kHeadDim2, Tile::kNumThreads, kIsAligned>(
                sStage + Tile::kStreamed1Bytes,
                rows_of_head(params.q2, batch_idx, head_idx, num_queries, params.head_dim2), first_query);
            load_rows<kBlockQ>(sStage + Tile::kStageBytes, params, batch_idx, head_idx, first_query);
        }
        cp_async_commit();
    }
    template <class Element, int kLines, int kElements>
    SKL_DEVICE void store_keys(const BackwardParams& params, int first_row, const float (&dk)[kLines][kElements], float factor) const {
        float row_factor[kLines];
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) row_factor[line] = params.gradient_scale * gradient_unit<kSide> / factor;
        store_gradient<Element>(params.dk, batch_idx * params.dk_rows.batch_stride + key_head_idx * params.dk_rows.head_stride,
                                params.dk_rows.row_stride, first_row, params.range.num_keys,
                                kSide == 1 ? params.head_dim1 : params.head_dim2, dk, row_factor);
    }
};

// dS^T of a tile of keys (rows) and queries (columns), times the upstream gradient of each query.
template <int kSide, int kBlockQ, int kLines, int kElements>
SKL_DEVICE void transposed_gradients(float (&ds)[kLines][kElements], const float (&s1)[kLines][kElements],
                                     const float (&s2)[kLines][kElements], const RowsOfTile<kBlockQ>& rows, int first_col,
                                     const BackwardParams& params, float factor) {
    SKL_UNROLL
    for (int e = 0; e < kElements; ++e) {
        const int col = first_col + col_of_element(e);
        const RowStatistics statistics = rows.statistics[col];
        const float dkl = rows.dkl[col] * factor;
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            ds[line][e] =
                dkl * logit_gradient<kSide>(s1[line][e], s2[line][e], statistics, params.scale1, params.scale2);
        }
    }
}

// Zeroes dS^T where the query does not exist or may not see the key. Returns whether a masked query holds a NaN or Inf, which
// must be scrubbed before dS^T multiplies it; trained are the logits of the side that gets gradients.
template <int kLines, int kElements>
SKL_DEVICE bool mask_transposed(float (&ds)[kLines][kElements], const float (&trained)[kLines][kElements],
                                const KeyRange& range, int first_key, int first_query) {
    bool leaks = false;
    SKL_UNROLL
    for (int e = 0; e < kElements; ++e) {
        const int query = first_query + col_of_element(e);
        const Interval keys = {range.begin(query), query < range.num_queries ? range.end(query) : 0};
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            const int key = first_key + row_of_line(line);
            const bool is_visible = key >= keys.begin && key < keys.end;
            leaks |= !is_visible && !is_finite(trained[line][e]);
            ds[line][e] = is_visible ? ds[line][e] : 0.f;
        }
    }
    return leaks;
}
