// What the backward kernels share: their shared memory (two stationary tiles, one of each side, and
// a ring of pairs of streamed tiles; queries are stationary for dQ, keys for dK and in the fused
// kernel) and the blocks of keys.
#pragma once
#include "base.cuh"
#include "gradient.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "smem.cuh"
#include "softcap.cuh"

// Head dimensions in units of 16 bits.
template <int kSide, int kHeadDim1, int kHeadDim2, int kRowTiles, int kNumWarps_, int kBlockCols,
          int kNumStages>
struct BackwardTile {
    static constexpr int kNumWarps = kNumWarps_, kNumThreads = 32 * kNumWarps;
    static constexpr int kRowsPerWarp = 16 * kRowTiles, kBlockRows = kRowsPerWarp * kNumWarps;
    static_assert(kNumStages >= 2, "the next tile is under way while one is used");

    static constexpr int kStationary1Bytes = kBlockRows * kHeadDim1 * 2;
    static constexpr int kStationaryBytes = kStationary1Bytes + kBlockRows * kHeadDim2 * 2;
    static constexpr int kStreamed1Bytes = kBlockCols * kHeadDim1 * 2;
    static constexpr int kStageBytes = kStreamed1Bytes + kBlockCols * kHeadDim2 * 2;
};

// What belongs to the query rows of a tile.
// Aligned, so that the tiles of the next stage are: their addresses are permuted by exclusive or.
template <int kBlockQ>
struct alignas(128) RowsOfTile {
    RowStatistics statistics[kBlockQ];
    float dkl[kBlockQ];
};

// Starts the copy of the rows [first_query, first_query + kBlockQ) of one head. Rows that do not
// exist read as zero.
template <int kBlockQ>
SKL_DEVICE void load_rows(uint32 destination, const BackwardParams& params, int batch_idx,
                          int head_idx, int first_query) {
    const int idx = threadIdx.x;
    if (idx >= kBlockQ) return;
    const int query = first_query + idx;
    const bool is_inside = query < params.range.num_queries;
    const int64 row =
        (static_cast<int64>(batch_idx) * params.num_heads + head_idx) * params.range.num_queries +
        query;
    const int64 at = batch_idx * params.dkl_rows.batch_stride +
                     head_idx * params.dkl_rows.head_stride + query * params.dkl_rows.row_stride;
    cp_async_16(destination + idx * static_cast<int>(sizeof(RowStatistics)),
                params.row_statistics + (is_inside ? 4 * row : 0), is_inside);
    cp_async_4(destination + kBlockQ * static_cast<int>(sizeof(RowStatistics)) + idx * 4,
               params.dkl + (is_inside ? at : 0), is_inside);
}

// A block of the key-stationary kernels: its keys, its walk over the queries (schedule.cuh), and
// what it loads and stores. It lives in shared memory: the registers belong to the accumulators.
template <class Element, class Tile_, int kSide, int kHeadDim1, int kHeadDim2, int kBlockQ,
          bool kIsAligned>
struct KeyBlock : QueryWalk<kSide, Tile_::kBlockRows, kBlockQ> {
    using Tile = Tile_;
    static constexpr int kStageBytes =
        Tile::kStageBytes + static_cast<int>(sizeof(RowsOfTile<kBlockQ>));

    using Walk = QueryWalk<kSide, Tile::kBlockRows, kBlockQ>;
    using Walk::batch_idx, Walk::first_key, Walk::is_past, Walk::key_head_idx;

    template <class Range>
    SKL_DEVICE void init(const BackwardParams& params, const Range& range) {
        Walk::start(params, range, blockIdx.x);
    }

    template <int kWhich>
    SKL_DEVICE void load_keys(const BackwardParams& params, uint32 tile, int head_idx) const {
        constexpr int kHeadDim = kWhich == 1 ? kHeadDim1 : kHeadDim2;
        const int key_head = head_idx / (kWhich == 1 ? params.group1 : params.group2);
        load_tile<Tile::kBlockRows, kHeadDim, Tile::kNumThreads, kIsAligned>(
            tile,
            rows_of_head<Element>(kWhich == 1 ? params.k1 : params.k2, batch_idx, key_head,
                                  params.range.num_keys,
                                  kWhich == 1 ? params.head_dim1 : params.head_dim2),
            first_key);
    }
    // A tile of queries with its rows, as one group of copies; an empty group behind the last tile,
    // so that the count of pending groups stays the same.
    SKL_DEVICE void load_queries(const BackwardParams& params, QueryTile tile,
                                 uint32 sStage) const {
        if (!is_past(tile)) {
            const auto [head_idx, first_query] = tile;
            const int num_queries = params.range.num_queries;
            load_tile<kBlockQ, kHeadDim1, Tile::kNumThreads, kIsAligned>(
                sStage,
                rows_of_head<Element>(params.q1, batch_idx, head_idx, num_queries,
                                      params.head_dim1),
                first_query);
            load_tile<kBlockQ, kHeadDim2, Tile::kNumThreads, kIsAligned>(
                sStage + Tile::kStreamed1Bytes,
                rows_of_head<Element>(params.q2, batch_idx, head_idx, num_queries,
                                      params.head_dim2),
                first_query);
            load_rows<kBlockQ>(sStage + Tile::kStageBytes, params, batch_idx, head_idx,
                               first_query);
        }
        cp_async_commit();
    }
    template <int kLines, int kElements>
    SKL_DEVICE void store_keys(const BackwardParams& params, int first_row,
                               const float (&dk)[kLines][kElements], float scale, bool adds) const {
        float row_factor[kLines];
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) row_factor[line] = scale;
        store_gradient<Element>(
            params.dk,
            batch_idx * params.dk_rows.batch_stride + key_head_idx * params.dk_rows.head_stride,
            params.dk_rows.row_stride, first_row, params.range.num_keys,
            kSide == 1 ? params.head_dim1 : params.head_dim2, dk, row_factor, adds);
    }
};

// dS^T of a tile of keys (rows) and queries (columns), times the upstream gradient of each query.
template <int kSide, bool kHasSoftcap, int kBlockQ, int kLines, int kElements>
SKL_DEVICE void transposed_gradients(float (&ds)[kLines][kElements],
                                     const float (&s1)[kLines][kElements],
                                     const float (&s2)[kLines][kElements],
                                     const RowsOfTile<kBlockQ>& rows, int first_col,
                                     const BackwardParams& params, float factor) {
    auto& trained = kSide == 1 ? s1 : s2;
    take_trained<kSide, kHasSoftcap, false>(
        ds, trained, params, [&](int line, int e, const CappedLogit& logit) {
            const int col = first_col + col_of_element(e);
            const RowStatistics statistics = rows.statistics[col];
            const float dkl = rows.dkl[col] * factor;
            ds[line][e] =
                dkl * product_gradient<kSide, kHasSoftcap>(logit, ds[line][e], statistics, params);
        });
}

// Whether a key in shared memory holds a NaN or Inf.
template <class Element, int kHeadDim>
SKL_DEVICE bool is_broken_key(const unsigned char* keys, int row) {
    using Keys = TileLayout<kHeadDim>;
    bool is_broken = false;
    SKL_NO_UNROLL
    for (int i = 0; i < kHeadDim / 2; ++i) {
        const uint32 pair =
            *reinterpret_cast<const uint32*>(keys + Keys::offset_bytes(row, i / 4) + i % 4 * 4);
        is_broken |= finite_or_zero<Element>(pair) != pair;
    }
    return is_broken;
}

// Whether any of this thread's share of a tile of keys does.
template <class Element, int kHeadDim, int kBlockKeys, int kNumThreads>
SKL_DEVICE bool has_broken_keys(const unsigned char* keys) {
    bool has_broken = false;
    SKL_NO_UNROLL
    for (int row = threadIdx.x; row < kBlockKeys; row += kNumThreads) {
        has_broken |= is_broken_key<Element, kHeadDim>(keys, row);
    }
    return has_broken;
}

// Writes NaN into dS^T (in shared memory, [keys][queries]) for every query that sees a key with a
// NaN or Inf in it: the product for dQ is about to read such keys as zero, for the sake of the
// queries that do not see them.
template <class Element, int kHeadDim, int kBlockKeys, int kBlockQ, int kNumThreads, class Range>
SKL_DEVICE void mark_broken_keys(unsigned char* gradients, const unsigned char* keys,
                                 const Range& range, int first_key, int first_query) {
    using Gradients = TileLayout<ceil_div(kBlockQ, 32) * 32>;
    SKL_NO_UNROLL
    for (int row = threadIdx.x; row < kBlockKeys; row += kNumThreads) {
        if (!is_broken_key<Element, kHeadDim>(keys, row)) continue;
        const int key = first_key + row;
        SKL_NO_UNROLL
        for (int col = 0; col < kBlockQ; ++col) {
            const int query = first_query + col;
            if (query < range.num_queries && key >= range.begin(query) && key < range.end(query)) {
                *reinterpret_cast<uint16*>(gradients + Gradients::offset_bytes(row, col / 8) +
                                           col % 8 * 2) = 0x7fff;
            }
        }
    }
}
