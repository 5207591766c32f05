// forward_sm90: what forward_sm80 computes, by Hopper's warpgroup products and copy engine.
//
//   kl = ln 2 (acc / l1 + log2 l2 - log2 l1)       with {m1 l1 m2 l2 acc} as in kl_state.cuh
//
//   q1 [B, H, N_Q, D1]  k1 [B, H_K1, N_K, D1]  q2 [B, H, N_Q, D2]  k2 [B, H_K2, N_K, D2]   -> rows
//   [B, H, N_Q]
//
// Grid: one block per (batch, head or pack of heads, tile of kBlockQ rows, split of the keys),
// heavy query tiles of a head first. Warpgroup 0 produces: one lane asks the copy engine for tiles.
// Each further warpgroup consumes: it owns 64 query rows.
//
//   1. Q1 and Q2 are fetched behind the first tile of keys, so that a consumer starts as soon as
//   its own rows are there; queries that live in registers pass through the first two stages of the
//   ring instead.
//   2. Tiles of K1 and K2 run through a ring of kNumStages buffers.
//   3. S1 = Q1 K1^T and S2 = Q2 K2^T of a tile are multiplied together, by two consumers in turn;
//   tiles on the border of the key range are masked.
//   4. The running state of each row takes the tile in. It stays private to the thread (its columns
//   of its rows).
//   5. The four threads of a row merge their states.
//   6. The row is finished and written, or its raw state goes to the workspace for reduce_splits.
#include "fragment.cuh"
#include "key_range.cuh"
#include "kl_state.cuh"
#include "params.cuh"
#include "pipeline.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "softcap.cuh"
#include "warpgroup.cuh"
#include "write_rows.cuh"

template <int kHeadDim1, int kHeadDim2, int kNumConsumers_, int kBlockK_, int kNumStages_,
          bool kQueriesInRegisters, bool kIsPacked>
struct ForwardTraits {
    static constexpr int kNumConsumers = kNumConsumers_, kBlockK = kBlockK_,
                         kNumStages = kNumStages_;
    static constexpr int kBlockQ = 64 * kNumConsumers;
    static constexpr int kNumThreads = 128 * (kNumConsumers + 1);

    // Packed queries are one box, others one for each consumer, with a barrier of its own.
    static constexpr int kNumBoxes = kIsPacked ? 1 : kNumConsumers;
    static constexpr int kQ1Bytes = PanelTile<kHeadDim1>::num_bytes(kBlockQ);
    static constexpr int kQ2Bytes = PanelTile<kHeadDim2>::num_bytes(kBlockQ);
    static constexpr int kK1Bytes = PanelTile<kHeadDim1>::num_bytes(kBlockK);
    static constexpr int kStageBytes = kK1Bytes + PanelTile<kHeadDim2>::num_bytes(kBlockK);
    static_assert(!kQueriesInRegisters ||
                      (kNumStages >= 2 && max_of(kQ1Bytes, kQ2Bytes) <= kStageBytes),
                  "queries on their way to registers take one stage a side");
    static constexpr int kRingOffset = kQueriesInRegisters ? 0 : kQ1Bytes + kQ2Bytes;
    static constexpr int kBarrierOffset = kRingOffset + kNumStages * kStageBytes;

    // Two consumers left to themselves fall into step, now and then for good: the matrix units then
    // idle while both take exponentials. Three fill one another's gaps in any order.
    static constexpr bool kTakesTurns = kNumConsumers == 2;
    static constexpr int kTurnBarrier = 1;

    // Registers move from the producer to the consumers; the sum may not pass the file's 64 K.
    static constexpr int kProducerRegisters = kNumConsumers == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : 240;
};

template <class Element, int kHeadDim1, int kHeadDim2, int kNumConsumers, int kBlockK,
          int kNumStages, bool kQueriesInRegisters, bool kIsPacked, Mask kMask, bool kHasEntropy,
          bool kHasSoftcap>
__global__ void __launch_bounds__(128 * (kNumConsumers + 1), 1)
    forward_sm90(const __grid_constant__ InputMaps maps,
                 const __grid_constant__ ForwardParams params) {
    using Traits = ForwardTraits<kHeadDim1, kHeadDim2, kNumConsumers, kBlockK, kNumStages,
                                 kQueriesInRegisters, kIsPacked>;
    using Tile1 = PanelTile<kHeadDim1>;
    using Tile2 = PanelTile<kHeadDim2>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32 sQ1 = shared_address(smem), sQ2 = sQ1 + Traits::kQ1Bytes;
    const uint32 sRing = sQ1 + Traits::kRingOffset;
    const uint32 ring_barriers = sQ1 + Traits::kBarrierOffset,
                 query_barriers = ring_barriers + Ring<kNumStages>::kBytes;
    Ring<kNumStages> ring(ring_barriers);

    if (threadIdx.x == 0) {
        tma_prefetch(&maps.k1);
        tma_prefetch(&maps.k2);
        tma_prefetch(&maps.q1);
        tma_prefetch(&maps.q2);
    }
    const ForwardBlock block = forward_block(params, blockIdx.x);
    const int batch_idx = block.batch_idx, head_idx = block.head_idx;
    const auto& range = range_of_entry<kMask>(params, batch_idx);
    const TileRange tiles = tiles_of_split<kBlockK>(
        range, block.first_query, params.queries_per_tile, block.split_idx, params.num_splits);
    const int origin = origin_of<kBlockK>(range, block.first_query);
    const int warpgroup = warp_id() / 4;

    if (threadIdx.x == 0) {
        Ring<kNumStages>::init(ring_barriers, 4 * kNumConsumers);
        SKL_UNROLL
        for (int box = 0; box < Traits::kNumBoxes; ++box) {
            mbarrier_init(query_barriers + 8 * box, 1);
        }
        mbarrier_fence_init();
    }
    __syncthreads();

    if (warpgroup == 0) {
        give_registers<Traits::kProducerRegisters>();
        if (warp_id() != 0) return;
        const int lane = lane_id();
        // The whole warp walks the tiles, so that the operands of the copies stay in uniform
        // registers.
        const int key_head1 = map_index(params.k1.head_stride, head_idx / params.group1);
        const int key_head2 = map_index(params.k2.head_stride, head_idx / params.group2);
        const int key_batch1 = map_index(params.k1.batch_stride, batch_idx),
                  key_batch2 = map_index(params.k2.batch_stride, batch_idx);
        const auto load_keys = [&](int tile) {
            ring.producer_acquire();
            if (lane == 0) {
                const uint32 sK1 = sRing + ring.stage * Traits::kStageBytes;
                ring.producer_expect(Traits::kStageBytes);
                Tile1::template load<kBlockK>(sK1, maps.k1, tile * kBlockK + origin, key_head1,
                                              key_batch1, ring.full());
                Tile2::template load<kBlockK>(sK1 + Traits::kK1Bytes, maps.k2,
                                              tile * kBlockK + origin, key_head2, key_batch2,
                                              ring.full());
            }
            __syncwarp();
            ring.advance();
        };
        int tile = tiles.begin;
        if (!kQueriesInRegisters && tile < tiles.end) load_keys(tile++);
        // 1. The queries.
        if (lane == 0) {
            const int rows_of_box =
                kIsPacked ? params.heads_per_tile * params.queries_per_tile : 64;
            const int bytes1 = Tile1::num_bytes(rows_of_box),
                      bytes2 = Tile2::num_bytes(rows_of_box);
            const int head1 = map_index(params.q1.head_stride, head_idx),
                      head2 = map_index(params.q2.head_stride, head_idx);
            const int batch1 = map_index(params.q1.batch_stride, batch_idx),
                      batch2 = map_index(params.q2.batch_stride, batch_idx);
            // The map of packed queries has its heads before its rows.
            const auto load1 = [&](uint32 tile_of_queries, int box, uint32 barrier) {
                const int query = block.first_query + 64 * box;
                Tile1::template load<Traits::kBlockQ>(tile_of_queries + 64 * 128 * box, maps.q1,
                                                      kIsPacked ? head1 : query,
                                                      kIsPacked ? query : head1, batch1, barrier);
            };
            const auto load2 = [&](uint32 tile_of_queries, int box, uint32 barrier) {
                const int query = block.first_query + 64 * box;
                Tile2::template load<Traits::kBlockQ>(tile_of_queries + 64 * 128 * box, maps.q2,
                                                      kIsPacked ? head2 : query,
                                                      kIsPacked ? query : head2, batch2, barrier);
            };
            if constexpr (kQueriesInRegisters) {
                ring.producer_expect(Traits::kNumBoxes * bytes1);
                SKL_UNROLL
                for (int box = 0; box < Traits::kNumBoxes; ++box) load1(sRing, box, ring.full());
                ring.advance();
                ring.producer_expect(Traits::kNumBoxes * bytes2);
                SKL_UNROLL
                for (int box = 0; box < Traits::kNumBoxes; ++box) {
                    load2(sRing + Traits::kStageBytes, box, ring.full());
                }
            } else {
                SKL_UNROLL
                for (int box = 0; box < Traits::kNumBoxes; ++box) {
                    const uint32 barrier = query_barriers + 8 * box;
                    mbarrier_arrive_expect_bytes(barrier, bytes1 + bytes2);
                    load1(sQ1, box, barrier);
                    load2(sQ2, box, barrier);
                }
            }
        }
        if constexpr (kQueriesInRegisters) {
            ring.stage = 2 % kNumStages;
            ring.phase = kNumStages == 2 ? 1 : 0;
        }
        // 2. The other keys.
        SKL_NO_UNROLL
        for (; tile < tiles.end; ++tile) load_keys(tile);
        return;
    }

    take_registers<Traits::kConsumerRegisters>();
    const int lane = lane_id();
    const TileRows<kIsPacked> rows_of_group(params, block, 64 * (warpgroup - 1));
    const TileRows<kIsPacked> rows = rows_of_group.after(16 * (warp_id() % 4));
    using State = StateOf<kHasEntropy>;
    State state[2] = {empty_state<State>(), empty_state<State>()};
    const int first_query = rows_of_group.query(0), last_query = rows_of_group.query(63);
    const Interval any = range.any_of(first_query, last_query);
    const Interval all = range.all_of(first_query, last_query);
    const bool has_rows = rows_of_group.exists(0, range.num_queries);

    using Queries1 = typename Choose<kQueriesInRegisters, PanelRegisters<kHeadDim1>,
                                     PanelShared<kHeadDim1>>::Type;
    using Queries2 = typename Choose<kQueriesInRegisters, PanelRegisters<kHeadDim2>,
                                     PanelShared<kHeadDim2>>::Type;
    Queries1 queries1;
    Queries2 queries2;
    if constexpr (kQueriesInRegisters) {
        ring.consumer_wait();
        queries1.load(sRing, Traits::kBlockQ, 64 * (warpgroup - 1));
        __syncwarp();
        ring.consumer_release(lane);
        ring.advance();
        ring.consumer_wait();
        queries2.load(sRing + Traits::kStageBytes, Traits::kBlockQ, 64 * (warpgroup - 1));
        __syncwarp();
        ring.consumer_release(lane);
        ring.advance();
    } else {
        queries1.load(sQ1, Traits::kBlockQ, 64 * (warpgroup - 1));
        queries2.load(sQ2, Traits::kBlockQ, 64 * (warpgroup - 1));
        // Also where no tile follows: no copy may outlive its block.
        mbarrier_wait(query_barriers + 8 * (kIsPacked ? 0 : warpgroup - 1), 0);
    }

    const Turns turns = {Traits::kTurnBarrier, warpgroup - 1};
    if (Traits::kTakesTurns && tiles.begin < tiles.end) turns.start();
    SKL_NO_UNROLL
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
        const int first_key = tile * kBlockK + origin;
        ring.consumer_wait();
        if constexpr (Traits::kTakesTurns) turns.begin();
        if (!has_rows || first_key >= any.end || first_key + kBlockK <= any.begin) {
            ring.consumer_release(lane);
            ring.advance();
            if constexpr (Traits::kTakesTurns) turns.end(tile + 1 < tiles.end);
            continue;
        }
        // 3. The logits.
        float s1[2][kBlockK / 4], s2[2][kBlockK / 4];
        const uint32 sK1 = sRing + ring.stage * Traits::kStageBytes;
        wgmma_fence();
        multiply_panels<Element, kHeadDim1, kBlockK>(s1, queries1, sK1);
        multiply_panels<Element, kHeadDim2, kBlockK>(s2, queries2, sK1 + Traits::kK1Bytes);
        wgmma_commit();
        wgmma_wait<0>();
        pin_all(s1);
        pin_all(s2);
        ring.consumer_release(lane);
        ring.advance();
        if constexpr (Traits::kTakesTurns) turns.end(tile + 1 < tiles.end);
        if constexpr (kHasSoftcap) {
            cap_scores(s1, params.tanh_scale1);
            cap_scores(s2, params.tanh_scale2);
        }
        if (first_key < all.begin || first_key + kBlockK > all.end) {
            mask_scores(s1, s2, range, rows, first_key, params.masked_logit1, params.masked_logit2);
        }
        // 4. The state.
        update(state, s1, s2, params.scale1, params.scale2);
        __syncwarp();
    }

    // 5. and 6. The rows.
    SKL_UNROLL
    for (int line = 0; line < 2; ++line) {
        const State merged = merge_lanes<2>(state[line]);
        const int row = row_of_line(line);
        if (lane % 4 == 0 && rows.exists(row, range.num_queries)) {
            write_state(params, range, block, rows.head(row), rows.query(row), merged);
        }
    }
}
