// backward_fused_sm80: dQ and dK of one side from one pass over the logits, keys stationary. Any
// card from sm_80 on.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i     dq_t,i = scale_t dkl_i sum_j ds_t,ij k_t,j t =
//   kSide, ds as in gradient.cuh
//
// Four products an element instead of the separate kernels' six. Blocks add their parts of dQ to a
// float32 scratch in no fixed order, so the last bits of dQ differ from run to run; backward_finish
// scales and rounds it. dK has a fixed order. Without kHasDk only dQ is made: for few queries on
// many keys, where blocks of queries would leave most of the card idle.
//
// Grid: one block per (batch, key head of side t, block of kBlockK keys). A warp owns 16 kRowTiles
// keys.
//
//   1. K1 and K2 come to shared memory. A group of heads may share K_t and not the other: that one
//   is exchanged on the way.
//   2. Tiles of Q1 and Q2, with their row statistics and dkl, run through a ring of kNumStages
//   buffers, head after head.
//   3. S1^T = K1 Q1^T and S2^T = K2 Q2^T.
//   4. dkl dS^T, zero where a query may not see the key.
//   5. dK += dS^T Q_t; the accumulators of dS^T become the left operand without leaving the
//   registers.
//   6. dS^T goes to shared memory; all warps together make dQ = dS K_t, each its columns, and add
//   it to the scratch.
//   7. dK is scaled by scale_t and written.
#include "backward_tile.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "scores.cuh"
#include "smem.cuh"

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kRowTiles, int kNumWarps,
          int kBlockQ, int kNumStages, bool kHasDk, bool kIsAligned, Mask kMask, bool kHasSoftcap>
__global__ void __launch_bounds__(32 * kNumWarps, kNumWarps <= 4 ? 2 : 1)
    backward_fused_sm80(const BackwardParams params) {
    using Tile =
        BackwardTile<kSide, kHeadDim1, kHeadDim2, kRowTiles, kNumWarps, kBlockQ, kNumStages>;
    using Block = KeyBlock<Element, Tile, kSide, kHeadDim1, kHeadDim2, kBlockQ, kIsAligned>;
    constexpr int kGradientPitch = ceil_div(kBlockQ, 32) * 32;  // of dS^T: [keys][queries]
    using GradientLayout = TileLayout<kGradientPitch>;
    constexpr int kLines = 2 * kRowTiles, kHeadDim = kSide == 1 ? kHeadDim1 : kHeadDim2;
    constexpr int kGradientOffset = Tile::kStationaryBytes + kNumStages * Block::kStageBytes;
    // Columns of dQ are dealt to warps in pairs of column tiles.
    constexpr int kColPairs = kHeadDim / 16, kColPairsPerWarp = ceil_div(kColPairs, kNumWarps);
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ uint32 sLargest, sHasBroken;  // the latter of a ragged batch alone
    const uint32 sK1 = shared_address(smem), sK2 = sK1 + Tile::kStationary1Bytes;
    const uint32 sRing = sK1 + Tile::kStationaryBytes, sGradient = sK1 + kGradientOffset;

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
    StationaryShared<kHeadDim1, kRowTiles> keys1;
    StationaryShared<kHeadDim2, kRowTiles> keys2;
    keys1.load(sK1 + warp_id() * Tile::kRowsPerWarp * kHeadDim1 * 2);
    keys2.load(sK2 + warp_id() * Tile::kRowsPerWarp * kHeadDim2 * 2);

    // 2. The ring of query tiles.
    QueryTile tile_to_load = block.first_tile();
    SKL_UNROLL
    for (int stage = 0; stage < kNumStages - 1; ++stage, tile_to_load = block.next(tile_to_load)) {
        block.load_queries(params, tile_to_load, sRing + stage * Block::kStageBytes);
    }

    const LaneOffset<kHeadDim1> lane1 = lane_offset_b<kHeadDim1>();
    const LaneOffset<kHeadDim2> lane2 = lane_offset_b<kHeadDim2>();
    const LaneOffset<kHeadDim> lane_of_product = lane_offset_a<kHeadDim>();
    const LaneOffset<kGradientPitch> lane_of_gradient = lane_offset_b<kGradientPitch>();
    float factor = call_factor<Element>(params.max_dkl);
    float dk[kLines][kHeadDim / 4];
    clear(dk);

    if constexpr (Range::kIsRagged) {
        cp_async_wait<0>();
        __syncthreads();
        const bool has_broken = __syncthreads_or(
            has_broken_keys<Element, kHeadDim, Tile::kBlockRows, Tile::kNumThreads>(
                smem + (kSide == 1 ? 0 : Tile::kStationary1Bytes)));
        if (threadIdx.x == 0) sHasBroken = has_broken;
    }

    int stage = 0;
    SKL_NO_UNROLL
    for (QueryTile tile = block.first_tile(); !block.is_past(tile); tile = block.next(tile)) {
        const int first_query = tile.first_query, last_query = first_query + kBlockQ - 1;
        // Made anew, or the place of the batch entry stays in a register all the time.
        const Range& range = range_of_entry<kMask>(params, block.batch_idx);
        if (block.exchanges_keys(params, tile)) {
            __syncthreads();
            block.template load_keys<3 - kSide>(params, kSide == 1 ? sK2 : sK1, tile.head_idx);
            cp_async_commit();
            cp_async_wait<0>();
        }
        cp_async_wait<kNumStages - 2>();
        __syncthreads();
        const int free_stage = stage == 0 ? kNumStages - 1 : stage - 1;
        block.load_queries(params, tile_to_load, sRing + free_stage * Block::kStageBytes);
        tile_to_load = block.next(tile_to_load);

        // 3. The logits.
        const int stage_offset = Tile::kStationaryBytes + stage * Block::kStageBytes;
        const uint32 sQ1 = sK1 + stage_offset, sQ2 = sQ1 + Tile::kStreamed1Bytes;
        const auto& rows =
            *reinterpret_cast<const RowsOfTile<kBlockQ>*>(smem + stage_offset + Tile::kStageBytes);
        float s1[kLines][kBlockQ / 4], s2[kLines][kBlockQ / 4];
        compute_scores<Element, kHeadDim1, kRowTiles, kBlockQ>(s1, keys1, sQ1, lane1);
        compute_scores<Element, kHeadDim2, kRowTiles, kBlockQ>(s2, keys2, sQ2, lane2);
        // 4. Their gradients, written over the logits of the other side.
        auto& ds = kSide == 1 ? s2 : s1;
        const Interval all = range.all_of(first_query, last_query);
        const bool is_border = first_key < all.begin || first_key + Tile::kRowsPerWarp > all.end ||
                               last_query >= range.num_queries;
        transposed_gradients<kSide, kHasSoftcap>(ds, s1, s2, rows, 0, params, factor);
        bool leaks = is_border && mask_transposed(ds, range, first_key, first_query);
        // An Inf in a key that a query does not see may leave no trace in dS.
        if constexpr (Range::kIsRagged) leaks |= is_border && sHasBroken != 0;
        if constexpr (kNeedsRunningFactor<Element, kSide>) {
            // All warps add to one dQ, so they share one factor.
            if (threadIdx.x == 0) sLargest = 0;
            const float largest = largest_magnitude(ds);
            if (__syncthreads_or(largest > kFp16Limit)) {
                atomicMax(&sLargest, __float_as_uint(largest));
                __syncthreads();
                const float shrink = shrink_to_limit(__uint_as_float(sLargest));
                multiply(ds, shrink);
                multiply(dk, shrink);
                factor *= shrink;
            }
        }
        // 5. dK.
        if constexpr (kHasDk) {
            const uint32 sQ = kSide == 1 ? sQ1 : sQ2;
            if (__any_sync(~0u, leaks)) {
                add_product<Element, kHeadDim, kRowTiles, kBlockQ, true>(dk, ds, sQ,
                                                                         lane_of_product);
            } else {
                add_product<Element, kHeadDim, kRowTiles, kBlockQ, false>(dk, ds, sQ,
                                                                          lane_of_product);
            }
        }
        // 6. dQ.
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            const int row = warp_id() * Tile::kRowsPerWarp + row_of_line(line);
            SKL_UNROLL
            for (int e = 0; e < kBlockQ / 4; e += 2) {
                const uint32 at =
                    sGradient + GradientLayout::offset_bytes(row, e / 2) + lane_id() % 4 * 4;
                store_shared_32(at, pack<Element>(ds[line][e], ds[line][e + 1]));
            }
        }
        const bool scrub = __syncthreads_or(leaks);
        if (scrub) {
            mark_broken_keys<Element, kHeadDim, Tile::kBlockRows, kBlockQ, Tile::kNumThreads>(
                smem + kGradientOffset, smem + (kSide == 1 ? 0 : Tile::kStationary1Bytes), range,
                block.first_key, first_query);
            __syncthreads();
        }
        float dq[kBlockQ / 8][kColPairsPerWarp * 4];
        clear(dq);
        const int first_pair = warp_id() * kColPairsPerWarp;
        const uint32 sK = kSide == 1 ? sK1 : sK2;
        SKL_NO_UNROLL
        for (int k = 0; k < Tile::kBlockRows / 16; ++k) {
            uint32 a[kBlockQ / 16][4];
            SKL_UNROLL
            for (int row_tile = 0; row_tile < kBlockQ / 16; ++row_tile) {
                ldmatrix_x4_trans(a[row_tile],
                                  lane_of_gradient.address(sGradient, 16 * k, row_tile));
            }
            SKL_UNROLL
            for (int pair = 0; pair < kColPairsPerWarp; ++pair) {
                if (first_pair + pair >= kColPairs) break;
                uint32 b[4];
                ldmatrix_x4_trans(b, lane_of_product.address(sK, 16 * k, first_pair + pair));
                if (scrub) {
                    SKL_UNROLL
                    for (int j = 0; j < 4; ++j) b[j] = finite_or_zero<Element>(b[j]);
                }
                multiply_step<Element, kBlockQ / 16>(dq, a, b, pair);
            }
        }
        const int64 head_of_batch =
            static_cast<int64>(block.batch_idx) * params.num_heads + tile.head_idx;
        const int row_tiles_per_head = ceil_div(range.num_queries, 16);
        SKL_UNROLL
        for (int row_tile = 0; row_tile < kBlockQ / 16; ++row_tile) {
            const int row_tile_of_head = first_query / 16 + row_tile;
            if (row_tile_of_head >= row_tiles_per_head) break;
            float* scratch =
                params.dq_scratch +
                ((head_of_batch * row_tiles_per_head + row_tile_of_head) * (kHeadDim / 8) +
                 2 * first_pair) *
                    128;
            SKL_UNROLL
            for (int tile = 0; tile < 2 * kColPairsPerWarp; ++tile) {
                if (2 * first_pair + tile >= 2 * kColPairs) break;
                const float* line0 = &dq[2 * row_tile][2 * tile];
                const float* line1 = &dq[2 * row_tile + 1][2 * tile];
                const float unscale = gradient_unit<kSide> / factor;
                reduce_add_global(scratch + tile * 128 + lane_id() * 4, line0[0] * unscale,
                                  line0[1] * unscale, line1[0] * unscale, line1[1] * unscale);
            }
        }
        stage = stage + 1 == kNumStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();

    // 7. The keys' rows.
    if constexpr (kHasDk) {
        block.store_keys(params, first_key, dk,
                         params.gradient_scale * gradient_unit<kSide> / factor, false);
    }
}
