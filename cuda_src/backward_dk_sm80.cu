// backward_dk_sm80: dK of one side, keys stationary, no atomics, the same bits every time. Any card
// from sm_80 on.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i         t = kSide, i over every query of every head
//   that shares the key head
//
// Grid: one block per (batch, key head of side t, block of kBlockK keys). A warp owns 16 kRowTiles
// keys.
//
//   1. K1 and K2 come to shared memory. A group of heads may share K_t and not the other: that one
//   is exchanged on the way.
//   2. Tiles of Q1 and Q2, with their row statistics and dkl, run through a ring of kNumStages
//   buffers, head after head.
//   3. S1^T = K1 Q1^T and S2^T = K2 Q2^T for kChunkQ queries at a time.
//   4. dkl dS^T of the chunk, zero where a query may not see the key.
//   5. dK += dS^T Q_t; the accumulators of dS^T become the left operand without leaving the
//   registers.
//   6. dK is scaled by scale_t and written.
#include "backward_tile.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "scores.cuh"
#include "smem.cuh"

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kRowTiles, int kNumWarps,
          int kBlockQ, int kChunkQ, int kNumStages, bool kIsAligned, Mask kMask, bool kHasSoftcap>
__global__ void __launch_bounds__(32 * kNumWarps, kNumWarps <= 4 ? 2 : 1)
    backward_dk_sm80(const BackwardParams params) {
    // Units of 16 bits in a row.
    constexpr int kUnits1 = kUnits<Element> * kHeadDim1, kUnits2 = kUnits<Element> * kHeadDim2;
    using Tile = BackwardTile<kSide, kUnits1, kUnits2, kRowTiles, kNumWarps, kBlockQ, kNumStages>;
    using Block = KeyBlock<Element, Tile, kSide, kUnits1, kUnits2, kBlockQ, kIsAligned>;
    constexpr int kLines = 2 * kRowTiles, kHeadDim = kSide == 1 ? kHeadDim1 : kHeadDim2;
    extern __shared__ __align__(128) unsigned char smem[];
    const uint32 sK1 = shared_address(smem), sK2 = sK1 + Tile::kStationary1Bytes;
    const uint32 sRing = sK1 + Tile::kStationaryBytes;

    __shared__ Block block;
    using Range = KeyRange<kMask>;
    const Range& range = range_of_entry<kMask>(params, batch_of_keys<kSide>(params, blockIdx.x));
    if (threadIdx.x == 0) block.init(params, range);
    __syncthreads();
    const int first_key = block.first_key + warp_id() * Tile::kRowsPerWarp;

    // 1. The keys.
    block.template load_keys<1>(params, sK1, block.head_begin);
    block.template load_keys<2>(params, sK2, block.head_begin);
    cp_async_commit();
    StationaryShared<kUnits1, kRowTiles> keys1;
    StationaryShared<kUnits2, kRowTiles> keys2;
    keys1.load(sK1 + warp_id() * Tile::kRowsPerWarp * kUnits1 * 2);
    keys2.load(sK2 + warp_id() * Tile::kRowsPerWarp * kUnits2 * 2);

    // 2. The ring of query tiles.
    QueryTile tile_to_load = block.first_tile();
    SKL_UNROLL
    for (int stage = 0; stage < kNumStages - 1; ++stage, tile_to_load = block.next(tile_to_load)) {
        block.load_queries(params, tile_to_load, sRing + stage * Block::kStageBytes);
    }

    const LaneOffset<kUnits1> lane1 = lane_offset_b<kUnits1>();
    const LaneOffset<kUnits2> lane2 = lane_offset_b<kUnits2>();
    const auto lane_of_product = lane_of_summed<Element, kHeadDim>();
    float factor = call_factor<Element>(params.max_dkl);
    float dk[kLines][kHeadDim / 4];
    clear(dk);
    // A sum that is stored in parts begins with zeros, to which all parts add.
    if constexpr (is_same<Element, fp32>) block.store_keys(params, first_key, dk, 0.f, false);

    int stage = 0;
    QueryTile tile = block.first_tile();
    do {  // once, but for fp32, whose sums are stored in parts
        int num_summed = 0;
        SKL_NO_UNROLL
        for (; !block.is_past(tile); tile = block.next(tile)) {
            const int first_query = tile.first_query;
            // Made anew, or the place of the batch entry stays in a register all the time.
            const Range& range = range_of_entry<kMask>(params, block.batch_idx);
            if (block.exchanges_keys(params, tile)) {
                __syncthreads();
                uint32 sExchanged = kSide == 1 ? sK2 : sK1;
                // Pinned, or the places of its chunks stay in registers since step 1.
                if constexpr (is_same<Element, fp32>) pin(sExchanged);
                block.template load_keys<3 - kSide>(params, sExchanged, tile.head_idx);
                cp_async_commit();
                cp_async_wait<0>();
            }
            cp_async_wait<kNumStages - 2>();
            __syncthreads();
            const int free_stage = stage == 0 ? kNumStages - 1 : stage - 1;
            block.load_queries(params, tile_to_load, sRing + free_stage * Block::kStageBytes);
            tile_to_load = block.next(tile_to_load);

            const int stage_offset = Tile::kStationaryBytes + stage * Block::kStageBytes;
            const uint32 sQ1 = sK1 + stage_offset, sQ2 = sQ1 + Tile::kStreamed1Bytes;
            const auto& rows = *reinterpret_cast<const RowsOfTile<kBlockQ>*>(smem + stage_offset +
                                                                             Tile::kStageBytes);
            SKL_NO_UNROLL
            for (int chunk = 0; chunk < kBlockQ; chunk += kChunkQ) {
                const int first = first_query + chunk, last = first + kChunkQ - 1;
                const Interval any = range.any_of(first, last), all = range.all_of(first, last);
                if (first >= range.num_queries || first_key >= any.end ||
                    first_key + Tile::kRowsPerWarp <= any.begin)
                    continue;
                // 3. The logits.
                float s1[kLines][kChunkQ / 4], s2[kLines][kChunkQ / 4];
                compute_scores<Element, kUnits1, kRowTiles, kChunkQ, true>(
                    s1, keys1, sQ1 + chunk * kUnits1 * 2, lane1);
                compute_scores<Element, kUnits2, kRowTiles, kChunkQ, true>(
                    s2, keys2, sQ2 + chunk * kUnits2 * 2, lane2);
                // 4. Their gradients, written over the logits of the other side.
                auto& ds = kSide == 1 ? s2 : s1;
                transposed_gradients<kSide, kHasSoftcap>(ds, s1, s2, rows, chunk, params, factor);
                bool leaks = false;
                if (first_key < all.begin || first_key + Tile::kRowsPerWarp > all.end ||
                    last >= range.num_queries) {
                    leaks = mask_transposed(ds, range, first_key, first);
                }
                if constexpr (kNeedsRunningFactor<Element, kSide>) fit_to_fp16(ds, dk, factor);
                // 5. dK.
                const uint32 sQ = (kSide == 1 ? sQ1 : sQ2) + chunk * kUnits<Element> * kHeadDim * 2;
                if (__any_sync(~0u, leaks)) {
                    add_product<Element, kHeadDim, kRowTiles, kChunkQ, true>(dk, ds, sQ,
                                                                             lane_of_product);
                } else {
                    add_product<Element, kHeadDim, kRowTiles, kChunkQ, false>(dk, ds, sQ,
                                                                              lane_of_product);
                }
            }
            stage = stage + 1 == kNumStages ? 0 : stage + 1;
            if (is_same<Element, fp32> && ++num_summed == kSummedCols / kBlockQ) {
                tile = block.next(tile);
                break;
            }
        }
        if (!is_same<Element, fp32> || block.is_past(tile)) break;
        block.store_keys(params, first_key, dk, params.gradient_scale * gradient_unit<kSide>, true);
        clear(dk);
    } while (true);
    cp_async_wait<0>();

    // 6. The keys' rows.
    block.store_keys(params, first_key, dk, params.gradient_scale * gradient_unit<kSide> / factor,
                     is_same<Element, fp32>);
}
