// backward_dq_sm80: dQ of one side, query rows stationary, no atomics, the same bits every time.
// Any card from sm_80 on.
//
//   dq_t,i = scale_t dkl_i sum_j ds_t,ij k_t,j         t = kSide, ds as in gradient.cuh
//
// Grid: one block per (batch, head, block of kBlockQ queries), heavy blocks of a head first. A warp
// owns 16 kRowTiles rows.
//
//   1. Q1 and Q2, the row statistics and dkl come to shared memory.
//   2. Tiles of K1 and K2 run through a ring of kNumStages buffers, filled by cp.async.
//   3. S1 = Q1 K1^T and S2 = Q2 K2^T for kChunkK keys at a time.
//   4. dS of the chunk, zero where a row may not see the key.
//   5. dQ += dS K_t; the accumulators of dS become the left operand without leaving the registers.
//   6. dQ is scaled by scale_t dkl_i and written.
#include "backward_tile.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "smem.cuh"
#include "softcap.cuh"

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kRowTiles, int kNumWarps,
          int kBlockK, int kChunkK, int kNumStages, bool kIsAligned, Mask kMask, bool kHasSoftcap>
__global__ void __launch_bounds__(32 * kNumWarps, kNumWarps <= 4 ? 2 : 1)
    backward_dq_sm80(const BackwardParams params) {
    // Units of 16 bits in a row.
    constexpr int kUnits1 = kUnits<Element> * kHeadDim1, kUnits2 = kUnits<Element> * kHeadDim2;
    using Tile = BackwardTile<kSide, kUnits1, kUnits2, kRowTiles, kNumWarps, kBlockK, kNumStages>;
    constexpr int kLines = 2 * kRowTiles, kHeadDim = kSide == 1 ? kHeadDim1 : kHeadDim2;
    constexpr int kRowsOffset = Tile::kStationaryBytes + kNumStages * Tile::kStageBytes;
    extern __shared__ __align__(128) unsigned char smem[];
    const uint32 sQ1 = shared_address(smem), sQ2 = sQ1 + Tile::kStationary1Bytes;
    const uint32 sRing = sQ1 + Tile::kStationaryBytes;

    const int head_of_batch = blockIdx.x / params.num_blocks;
    const int block_idx = params.num_blocks - 1 - blockIdx.x % params.num_blocks;
    const int batch_idx = head_of_batch / params.num_heads,
              head_idx = head_of_batch % params.num_heads;
    const int first_query = block_idx * Tile::kBlockRows;
    const int first_row = first_query + warp_id() * Tile::kRowsPerWarp;
    const auto& range = range_of_entry<kMask>(params, batch_idx);

    // 1. The queries and their statistics.
    const RowsOfHead gQ1 =
        rows_of_head<Element>(params.q1, batch_idx, head_idx, range.num_queries, params.head_dim1);
    const RowsOfHead gQ2 =
        rows_of_head<Element>(params.q2, batch_idx, head_idx, range.num_queries, params.head_dim2);
    const RowsOfHead gK1 = rows_of_head<Element>(params.k1, batch_idx, head_idx / params.group1,
                                                 range.num_keys, params.head_dim1);
    const RowsOfHead gK2 = rows_of_head<Element>(params.k2, batch_idx, head_idx / params.group2,
                                                 range.num_keys, params.head_dim2);
    load_tile<Tile::kBlockRows, kUnits1, Tile::kNumThreads, kIsAligned>(sQ1, gQ1, first_query);
    load_tile<Tile::kBlockRows, kUnits2, Tile::kNumThreads, kIsAligned>(sQ2, gQ2, first_query);
    load_rows<Tile::kBlockRows>(sQ1 + kRowsOffset, params, batch_idx, head_idx, first_query);
    cp_async_commit();
    const auto& rows = *reinterpret_cast<const RowsOfTile<Tile::kBlockRows>*>(smem + kRowsOffset);
    StationaryShared<kUnits1, kRowTiles> queries1;
    StationaryShared<kUnits2, kRowTiles> queries2;
    queries1.load(sQ1 + warp_id() * Tile::kRowsPerWarp * kUnits1 * 2);
    queries2.load(sQ2 + warp_id() * Tile::kRowsPerWarp * kUnits2 * 2);

    // 2. The ring of key tiles.
    const auto [tile_begin, tile_end] =
        tiles_of<kBlockK>(range, first_query, first_query + Tile::kBlockRows - 1);
    const int origin = origin_of<kBlockK>(range, first_query);
    const auto load_stage = [&, end = tile_end](int tile, int stage) {
        if (tile < end) {
            const uint32 sK1 = sRing + stage * Tile::kStageBytes;
            load_tile<kBlockK, kUnits1, Tile::kNumThreads, kIsAligned>(sK1, gK1,
                                                                       tile * kBlockK + origin);
            load_tile<kBlockK, kUnits2, Tile::kNumThreads, kIsAligned>(
                sK1 + Tile::kStreamed1Bytes, gK2, tile * kBlockK + origin);
        }
        cp_async_commit();  // empty at the end, so that the count of pending groups stays the same
    };
    SKL_UNROLL
    for (int i = 0; i < kNumStages - 1; ++i) load_stage(tile_begin + i, i);

    const Interval any = range.any_of(first_row, first_row + Tile::kRowsPerWarp - 1);
    const Interval all = range.all_of(first_row, first_row + Tile::kRowsPerWarp - 1);
    const LaneOffset<kUnits1> lane1 = lane_offset_b<kUnits1>();
    const LaneOffset<kUnits2> lane2 = lane_offset_b<kUnits2>();
    const auto lane_of_product = lane_of_summed<Element, kHeadDim>();
    float dq[kLines][kHeadDim / 4];
    clear(dq);
    float factor = is_same<Element, fp16> ? kFp16Limit : 1.f;  // |ds2| is at most 1
    // A sum that is stored in parts begins with zeros, to which all parts add.
    const auto store_rows = [&](bool begins, bool adds) {
        int batch = batch_idx, head = head_idx;
        if constexpr (is_same<Element, fp32>) {
            // Found anew, or the place of the rows stays in registers from here to the end.
            int block_of_all = blockIdx.x;
            pin(block_of_all);
            batch = block_of_all / params.num_blocks / params.num_heads;
            head = block_of_all / params.num_blocks % params.num_heads;
        }
        float row_factor[kLines];
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            int query = first_row + row_of_line(line);
            if constexpr (is_same<Element, fp32>) pin(query);  // one by one, or they spill
            // A row without keys has a zero gradient, whatever dkl is.
            const float dkl =
                range.begin(query) < range.end(query) ? rows.dkl[query - first_query] : 0.f;
            row_factor[line] =
                begins ? 0.f : dkl * (params.gradient_scale * gradient_unit<kSide> / factor);
        }
        store_gradient<Element>(
            params.dq, batch * params.dq_rows.batch_stride + head * params.dq_rows.head_stride,
            params.dq_rows.row_stride, first_row, range.num_queries,
            kSide == 1 ? params.head_dim1 : params.head_dim2, dq, row_factor, adds);
    };
    if constexpr (is_same<Element, fp32>) store_rows(true, false);

    int stage = 0, tile = tile_begin;
    SKL_NO_UNROLL
    do {  // once, but for fp32, whose sums are stored in parts
        const int end =
            is_same<Element, fp32> ? min_of(tile_end, tile + kSummedCols / kBlockK) : tile_end;
        SKL_NO_UNROLL
        for (; tile < end; ++tile) {
            cp_async_wait<kNumStages - 2>();
            __syncthreads();
            load_stage(tile + kNumStages - 1, stage == 0 ? kNumStages - 1 : stage - 1);

            const uint32 sK1 = sRing + stage * Tile::kStageBytes, sK2 = sK1 + Tile::kStreamed1Bytes;
            SKL_NO_UNROLL
            for (int chunk = 0; chunk < kBlockK; chunk += kChunkK) {
                const int first_key = tile * kBlockK + origin + chunk;
                if (first_row >= range.num_queries || first_key >= any.end ||
                    first_key + kChunkK <= any.begin)
                    continue;
                // 3. The logits.
                float s1[kLines][kChunkK / 4], s2[kLines][kChunkK / 4];
                compute_scores<Element, kUnits1, kRowTiles, kChunkK>(
                    s1, queries1, sK1 + chunk * kUnits1 * 2, lane1);
                compute_scores<Element, kUnits2, kRowTiles, kChunkK>(
                    s2, queries2, sK2 + chunk * kUnits2 * 2, lane2);
                // 4. Their gradients, written over the logits of the other side.
                auto& trained = kSide == 1 ? s1 : s2;
                auto& ds = kSide == 1 ? s2 : s1;
                take_trained<kSide, kHasSoftcap, true>(
                    ds, trained, params, [&](int line, int e, const CappedLogit& logit) {
                        const RowStatistics statistics =
                            rows.statistics[first_row - first_query + row_of_line(line)];
                        ds[line][e] = product_gradient<kSide, kHasSoftcap>(logit, ds[line][e],
                                                                           statistics, params);
                    });
                bool leaks = false;
                if (first_key < all.begin || first_key + kChunkK > all.end) {
                    leaks = mask_gradients(ds, trained, range, first_row, first_key);
                }
                if constexpr (is_same<Element, fp16>) multiply(ds, factor);
                if constexpr (kNeedsRunningFactor<Element, kSide>) fit_to_fp16(ds, dq, factor);
                // 5. dQ.
                const uint32 sK = (kSide == 1 ? sK1 : sK2) + chunk * kUnits<Element> * kHeadDim * 2;
                if (__any_sync(~0u, leaks)) {
                    add_product<Element, kHeadDim, kRowTiles, kChunkK, true>(dq, ds, sK,
                                                                             lane_of_product);
                } else {
                    add_product<Element, kHeadDim, kRowTiles, kChunkK, false>(dq, ds, sK,
                                                                              lane_of_product);
                }
            }
            stage = stage + 1 == kNumStages ? 0 : stage + 1;
        }
        if (!is_same<Element, fp32> || tile >= tile_end) break;
        if constexpr (is_same<Element, fp32>) store_rows(false, true);
        clear(dq);
    } while (true);
    // A block without tiles has not waited for its rows yet.
    cp_async_wait<0>();
    __syncthreads();

    // 6. The rows.
    store_rows(false, is_same<Element, fp32>);
}
