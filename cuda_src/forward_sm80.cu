// forward_sm80: KL(P1 || P2) of every query row, and the log-sum-exp of both sides. Any card from
// sm_80 on.
//
//   kl = ln 2 (acc / l1 + log2 l2 - log2 l1)       with {m1 l1 m2 l2 acc} as in kl_state.cuh
//
//   q1 [B, H, N_Q, D1]  k1 [B, H_K1, N_K, D1]  q2 [B, H, N_Q, D2]  k2 [B, H_K2, N_K, D2]   -> rows
//   [B, H, N_Q]
//
// Grid: one block per (batch, head or pack of heads, tile of kBlockQ rows, split of the keys),
// heavy query tiles of a head first. Warps: kNumWarpsQ x kNumWarpsK; a warp owns 16 kRowTiles query
// rows and every kNumWarpsK-th part of a key tile.
//
//   1. Q1 and Q2 come to shared memory and, where they fit, stay in registers as mma operands.
//   2. Tiles of K1 and K2 run through a ring of kNumStages buffers, filled by cp.async.
//   3. S1 = Q1 K1^T, S2 = Q2 K2^T for kChunkK keys at a time; tiles on the border of the key range
//   are masked.
//   4. The running state of each row takes the chunk in. It stays private to the thread (its
//   columns of its rows).
//   5. The four threads of a row, then the warps that share rows, merge their states.
//   6. The row is finished and written, or its raw state goes to the workspace for reduce_splits.
#include "fragment.cuh"
#include "key_range.cuh"
#include "kl_state.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "smem.cuh"
#include "softcap.cuh"
#include "write_rows.cuh"

template <class Element_, int kHeadDim1_, int kHeadDim2_, int kRowTiles_, int kNumWarpsQ_,
          int kNumWarpsK_, int kBlockK_, int kChunkK_, int kNumStages_, bool kQueriesInRegisters_,
          bool kIsAligned_, bool kHasEntropy_>
struct ForwardTraits {
    using Element = Element_;
    static constexpr int kHeadDim1 = kHeadDim1_, kHeadDim2 = kHeadDim2_;
    static constexpr int kRowTiles = kRowTiles_, kNumWarpsQ = kNumWarpsQ_, kNumWarpsK = kNumWarpsK_;
    static constexpr int kBlockK = kBlockK_, kChunkK = kChunkK_, kNumStages = kNumStages_;
    static constexpr bool kIsAligned = kIsAligned_;
    static constexpr bool kQueriesInRegisters = kQueriesInRegisters_;
    using State = StateOf<kHasEntropy_>;

    static constexpr int kNumThreads = 32 * kNumWarpsQ * kNumWarpsK;
    static constexpr int kRowsPerWarp = 16 * kRowTiles;
    static constexpr int kBlockQ = kRowsPerWarp * kNumWarpsQ;
    static constexpr int kLines = 2 * kRowTiles;
    static constexpr int kKeysPerWarp = kBlockK / kNumWarpsK;
    static_assert(kKeysPerWarp % kChunkK == 0,
                  "a warp walks its part of a key tile in whole chunks");

    // Units of 16 bits in a row.
    static constexpr int kUnits1 = kUnits<Element> * kHeadDim1,
                         kUnits2 = kUnits<Element> * kHeadDim2;
    static constexpr int kQ1Bytes = kBlockQ * kUnits1 * 2, kQ2Bytes = kBlockQ * kUnits2 * 2;
    static constexpr int kK1Bytes = kBlockK * kUnits1 * 2, kK2Bytes = kBlockK * kUnits2 * 2;
    static constexpr int kStageBytes = kK1Bytes + kK2Bytes;
    static constexpr int kQueryBytes = kQ1Bytes + kQ2Bytes;
    // Queries that move on to registers pass through the space of the ring.
    static constexpr int kRingOffset = kQueriesInRegisters ? 0 : kQueryBytes;
    static constexpr int kTileBytes = max_of(kQueryBytes, kRingOffset + kNumStages * kStageBytes);
    static constexpr int kStateBytes =
        kNumWarpsK > 1 ? kNumWarpsK * kBlockQ * static_cast<int>(sizeof(State)) : 0;
    static constexpr int kSmemBytes =
        max_of(kTileBytes, kStateBytes);  // states are exchanged after the last tile

    template <int kUnitsOfRow>
    using Stationary =
        typename Choose<kQueriesInRegisters, StationaryRegisters<kUnitsOfRow, kRowTiles>,
                        StationaryShared<kUnitsOfRow, kRowTiles>>::Type;
};

template <class Element, int kHeadDim1, int kHeadDim2, int kRowTiles, int kNumWarpsQ,
          int kNumWarpsK, int kBlockK, int kChunkK, int kNumStages, bool kQueriesInRegisters,
          bool kIsAligned, bool kIsPacked, Mask kMask, bool kHasEntropy, bool kHasSoftcap>
__global__ void __launch_bounds__(32 * kNumWarpsQ * kNumWarpsK, kNumWarpsQ* kNumWarpsK <= 4 ? 2 : 1)
    forward_sm80(const ForwardParams params) {
    using Traits =
        ForwardTraits<Element, kHeadDim1, kHeadDim2, kRowTiles, kNumWarpsQ, kNumWarpsK, kBlockK,
                      kChunkK, kNumStages, kQueriesInRegisters, kIsAligned, kHasEntropy>;
    using State = typename Traits::State;
    constexpr int kNumThreads = Traits::kNumThreads, kLines = Traits::kLines;
    constexpr int kUnits1 = Traits::kUnits1, kUnits2 = Traits::kUnits2;
    extern __shared__ __align__(128) unsigned char smem[];
    const uint32 sQ1 = shared_address(smem), sQ2 = sQ1 + Traits::kQ1Bytes;
    const uint32 sRing = sQ1 + Traits::kRingOffset;

    const ForwardBlock block = forward_block(params, blockIdx.x);
    const int batch_idx = block.batch_idx, head_idx = block.head_idx;
    const int warp_q = warp_id() % kNumWarpsQ;
    const int warp_k = kNumWarpsK == 1 ? 0 : warp_id() / kNumWarpsQ;
    const int first_row = warp_q * Traits::kRowsPerWarp;
    const TileRows<kIsPacked> rows(params, block, first_row);
    const auto& range = range_of_entry<kMask>(params, batch_idx);

    // 1. The queries.
    const RowsOfHead gQ1 =
        rows_of_head<Element>(params.q1, batch_idx, head_idx, range.num_queries, params.head_dim1);
    const RowsOfHead gQ2 =
        rows_of_head<Element>(params.q2, batch_idx, head_idx, range.num_queries, params.head_dim2);
    const RowsOfHead gK1 = rows_of_head<Element>(params.k1, batch_idx, head_idx / params.group1,
                                                 range.num_keys, params.head_dim1);
    const RowsOfHead gK2 = rows_of_head<Element>(params.k2, batch_idx, head_idx / params.group2,
                                                 range.num_keys, params.head_dim2);
    if constexpr (kIsPacked) {
        load_packed_tile<Traits::kBlockQ, kUnits1, kNumThreads, kIsAligned>(
            sQ1, gQ1, kUnits<Element> * params.q1.head_stride, TileRows<true>(params, block, 0));
        load_packed_tile<Traits::kBlockQ, kUnits2, kNumThreads, kIsAligned>(
            sQ2, gQ2, kUnits<Element> * params.q2.head_stride, TileRows<true>(params, block, 0));
    } else {
        load_tile<Traits::kBlockQ, kUnits1, kNumThreads, kIsAligned>(sQ1, gQ1, block.first_query);
        load_tile<Traits::kBlockQ, kUnits2, kNumThreads, kIsAligned>(sQ2, gQ2, block.first_query);
    }
    cp_async_commit();
    typename Traits::template Stationary<kUnits1> queries1;
    typename Traits::template Stationary<kUnits2> queries2;
    if constexpr (kQueriesInRegisters) {
        cp_async_wait<0>();
        __syncthreads();
    }
    queries1.load(sQ1 + first_row * kUnits1 * 2);
    queries2.load(sQ2 + first_row * kUnits2 * 2);
    if constexpr (kQueriesInRegisters) __syncthreads();

    // 2. The ring of key tiles.
    const TileRange tiles = tiles_of_split<kBlockK>(
        range, block.first_query, kIsPacked ? params.queries_per_tile : Traits::kBlockQ,
        block.split_idx, params.num_splits);
    const int origin = origin_of<kBlockK>(range, block.first_query);
    const auto load_stage = [&](int tile, int stage) {
        if (tile < tiles.end) {
            const uint32 sK1 = sRing + stage * Traits::kStageBytes;
            load_tile<kBlockK, kUnits1, kNumThreads, kIsAligned>(sK1, gK1, tile * kBlockK + origin);
            load_tile<kBlockK, kUnits2, kNumThreads, kIsAligned>(sK1 + Traits::kK1Bytes, gK2,
                                                                 tile * kBlockK + origin);
        }
        cp_async_commit();  // empty at the end, so that the count of pending groups stays the same
    };
    SKL_UNROLL
    for (int i = 0; i < kNumStages - 1; ++i) load_stage(tiles.begin + i, i);

    State state[kLines];
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) state[line] = empty_state<State>();
    const int first_query = rows.query(0), last_query = rows.query(Traits::kRowsPerWarp - 1);
    const Interval any = range.any_of(first_query, last_query);
    const Interval all = range.all_of(first_query, last_query);
    const bool has_rows = rows.exists(0, range.num_queries);
    const LaneOffset<kUnits1> lane1 = lane_offset_b<kUnits1>();
    const LaneOffset<kUnits2> lane2 = lane_offset_b<kUnits2>();

    int stage = 0;
    SKL_NO_UNROLL
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        cp_async_wait<kNumStages - 2>();
        __syncthreads();
        load_stage(tile + kNumStages - 1, stage == 0 ? kNumStages - 1 : stage - 1);

        const uint32 sK1 = sRing + stage * Traits::kStageBytes, sK2 = sK1 + Traits::kK1Bytes;
        SKL_NO_UNROLL
        for (int chunk = 0; chunk < Traits::kKeysPerWarp; chunk += kChunkK) {
            const int key_of_tile = warp_k * Traits::kKeysPerWarp + chunk;
            const int first_key = tile * kBlockK + origin + key_of_tile;
            if (!has_rows || first_key >= any.end || first_key + kChunkK <= any.begin) continue;
            // 3. The logits.
            float s1[kLines][kChunkK / 4], s2[kLines][kChunkK / 4];
            compute_scores<Element, kUnits1, kRowTiles, kChunkK>(
                s1, queries1, sK1 + key_of_tile * kUnits1 * 2, lane1);
            compute_scores<Element, kUnits2, kRowTiles, kChunkK>(
                s2, queries2, sK2 + key_of_tile * kUnits2 * 2, lane2);
            if constexpr (kHasSoftcap) {
                cap_scores(s1, params.tanh_scale1);
                cap_scores(s2, params.tanh_scale2);
            }
            if (first_key < all.begin || first_key + kChunkK > all.end) {
                mask_scores(s1, s2, range, rows, first_key, params.masked_logit1,
                            params.masked_logit2);
            }
            // 4. The state.
            update(state, s1, s2, params.scale1, params.scale2);
        }
        stage = stage + 1 == kNumStages ? 0 : stage + 1;
    }

    // 5. One state per row.
    cp_async_wait<0>();
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) state[line] = merge_lanes<2>(state[line]);
    if constexpr (kNumWarpsK > 1) {
        __syncthreads();
        State* sStates = reinterpret_cast<State*>(smem) + first_row;
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            if (lane_id() % 4 == 0)
                sStates[warp_k * Traits::kBlockQ + row_of_line(line)] = state[line];
        }
        __syncthreads();
        if (warp_k != 0) return;
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            for (int i = 1; i < kNumWarpsK; ++i) {
                state[line] = merge(state[line], sStates[i * Traits::kBlockQ + row_of_line(line)]);
            }
        }
    }

    // 6. The rows.
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        const int row = row_of_line(line);
        if (lane_id() % 4 == 0 && rows.exists(row, range.num_queries)) {
            write_state(params, range, block, rows.head(row), rows.query(row), state[line]);
        }
    }
}
