// What the deterministic pair on Hopper shares: shared memory, and the loop of a warpgroup over the
// tiles that stream past its rows.
//
// Own rows are queries for dQ and keys for dK; what streams past them is the other kind. Of each
// kind there are two tiles: of the side that is trained, which gets gradients and takes part in the
// third product, and of the fixed side, which only makes logits.
#pragma once
#include "base.cuh"
#include "gradient.cuh"
#include "params.cuh"
#include "pipeline.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "warpgroup.cuh"

template <int kSide_, int kHeadDim1, int kHeadDim2, int kNumConsumers_, int kBlockCols_,
          int kFixedStages_, int kTrainedStages_, int kFixedSteps, int kTrainedSteps,
          bool kStreamsQueries>
struct PairTraits {
    static constexpr int kSide = kSide_;
    static constexpr int kFixedDim = kSide == 1 ? kHeadDim2 : kHeadDim1;
    static constexpr int kTrainedDim = kSide == 1 ? kHeadDim1 : kHeadDim2;
    static constexpr int kNumConsumers = kNumConsumers_, kBlockRows = 64 * kNumConsumers;
    static constexpr int kBlockCols = kBlockCols_;
    static constexpr int kFixedStages = kFixedStages_, kTrainedStages = kTrainedStages_;
    static_assert(kFixedStages >= 1 && kTrainedStages >= 2,
                  "a trained tile is still multiplied while the next one makes logits");

    using FixedTile = PanelTile<kFixedDim>;
    using TrainedTile = PanelTile<kTrainedDim>;
    using FixedRows = PanelMixed<kFixedDim, kFixedSteps, kBlockRows>;
    using TrainedRows = PanelMixed<kTrainedDim, kTrainedSteps, kBlockRows>;

    // Own rows, rings, zeros, the statistics of streamed queries, barriers, the walk over queries.
    // Everything that the swizzle permutes lies at multiples of 1024.
    static constexpr int kFixedRowsBytes = FixedTile::num_bytes(kBlockRows);
    static constexpr int kTrainedRowsBytes = TrainedTile::num_bytes(kBlockRows);
    static constexpr int kFixedBytes = FixedTile::num_bytes(kBlockCols);
    static constexpr int kTrainedBytes = TrainedTile::num_bytes(kBlockCols);
    static constexpr int kStatisticsBytes =
        kStreamsQueries ? kBlockCols * static_cast<int>(sizeof(WeightedStatistics)) : 0;
    static constexpr int kTrainedRowsOffset = kFixedRowsBytes;
    static constexpr int kFixedRingOffset = kTrainedRowsOffset + kTrainedRowsBytes;
    static constexpr int kTrainedRingOffset = kFixedRingOffset + kFixedStages * kFixedBytes;
    static constexpr int kZerosOffset = kTrainedRingOffset + kTrainedStages * kTrainedBytes;
    static constexpr int kZerosBytes = 2048;  // what a product reads, and no less
    static constexpr int kStatisticsOffset = kZerosOffset + kZerosBytes;
    static constexpr int kFixedBarriers = kStatisticsOffset + kTrainedStages * kStatisticsBytes;
    static constexpr int kTrainedBarriers = kFixedBarriers + Ring<kFixedStages>::kBytes;
    static constexpr int kOwnFull = kTrainedBarriers + Ring<kTrainedStages>::kBytes;
    static constexpr int kOwnEmpty = kOwnFull + 8;
    static constexpr int kWalkOffset = kOwnEmpty + 8;
    static constexpr int kWalkBytes = kStreamsQueries ? 32 : 0;
    static constexpr int kSmemBytes = kWalkOffset + kWalkBytes;

    // Two consumers take turns, so that the matrix units work for one while the special function
    // units work for the other: with the exponentials or with the products, whichever is faster.
    // Narrow tiles lose by turns.
    static constexpr bool kExponentialsInTurn = kStreamsQueries && kNumConsumers == 2;
    static constexpr bool kProductsInTurn =
        !kStreamsQueries && kSide == 1 && kNumConsumers == 2 && kBlockCols == 64;

    // Registers move from the producer to the consumers, out of those that the launch bounds give.
    static_assert(kNumConsumers == 2 || kNumConsumers == 3, "no other block is dealt out");
    static constexpr int kProducerRegisters = kNumConsumers == 3 ? 32 : 24;
    static constexpr int kConsumerRegisters = kNumConsumers == 3 ? 160 : 240;
    static constexpr int kLaunchRegisters = 65536 / (128 * (kNumConsumers + 1)) / 8 * 8;
    static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <=
                      (kNumConsumers + 1) * kLaunchRegisters,
                  "a warpgroup that asks for more than is there waits for ever");
};

// One head of a tensor in the copy engine's eyes.
struct HeadMap {
    const TensorMap& map;
    int head, batch;

    template <class Tile, int kRows>
    SKL_DEVICE void load(uint32 tile, int first_row, uint32 barrier) const {
        Tile::template load<kRows>(tile, map, first_row, head, batch, barrier);
    }
};

// The queries of a query head and the keys that it uses, of side kWhich.
template <int kWhich>
SKL_DEVICE HeadMap query_map(const InputMaps& maps, const BackwardParams& params, int head_idx,
                             int batch_idx) {
    const TensorRef& q = kWhich == 1 ? params.q1 : params.q2;
    return {kWhich == 1 ? maps.q1 : maps.q2, map_index(q.head_stride, head_idx),
            map_index(q.batch_stride, batch_idx)};
}
template <int kWhich>
SKL_DEVICE HeadMap key_map(const InputMaps& maps, const BackwardParams& params, int head_idx,
                           int batch_idx) {
    const TensorRef& k = kWhich == 1 ? params.k1 : params.k2;
    const int group = kWhich == 1 ? params.group1 : params.group2;
    return {kWhich == 1 ? maps.k1 : maps.k2, map_index(k.head_stride, head_idx / group),
            map_index(k.batch_stride, batch_idx)};
}

// The shared memory of a block, and where each role stands in its rings.
template <class Traits>
struct PairSmem {
    using FixedRing = Ring<Traits::kFixedStages>;
    using TrainedRing = Ring<Traits::kTrainedStages>;

    uint32 base;
    FixedRing fixed;
    TrainedRing trained;

    SKL_DEVICE explicit PairSmem(uint32 base)
        : base(base),
          fixed(base + Traits::kFixedBarriers),
          trained(base + Traits::kTrainedBarriers) {}

    // Called by all threads, before the barrier that begins the work. The first of the barriers of
    // the own rows says that they have landed, the second that those of the fixed side may go.
    SKL_DEVICE void init() const {
        if (threadIdx.x == 0) {
            FixedRing::init(base + Traits::kFixedBarriers, 4 * Traits::kNumConsumers);
            TrainedRing::init(base + Traits::kTrainedBarriers, 4 * Traits::kNumConsumers);
            mbarrier_init(own_full(), 1);
            mbarrier_init(own_empty(), 4 * Traits::kNumConsumers * kArrivalsOfWarp);
            mbarrier_fence_init();
        }
        if (threadIdx.x < Traits::kZerosBytes / 16) {
            store_shared_128(zeros() + threadIdx.x * 16, {0, 0, 0, 0});
            fence_async_shared();
        }
    }
    SKL_DEVICE uint32 fixed_rows() const { return base; }
    SKL_DEVICE uint32 trained_rows() const { return base + Traits::kTrainedRowsOffset; }
    SKL_DEVICE uint32 fixed_tile() const {
        return base + Traits::kFixedRingOffset + fixed.stage * Traits::kFixedBytes;
    }
    SKL_DEVICE uint32 trained_tile() const {
        return base + Traits::kTrainedRingOffset + trained.stage * Traits::kTrainedBytes;
    }
    SKL_DEVICE uint32 zeros() const { return base + Traits::kZerosOffset; }
    SKL_DEVICE int statistics_offset() const {
        return Traits::kStatisticsOffset + trained.stage * Traits::kStatisticsBytes;
    }
    SKL_DEVICE uint32 own_full() const { return base + Traits::kOwnFull; }
    SKL_DEVICE uint32 own_empty() const { return base + Traits::kOwnEmpty; }

    // The producer's part: own rows, and a tile each as soon as there is room.
    SKL_DEVICE void load_rows(const HeadMap& fixed_map, const HeadMap& trained_map,
                              int first_row) const {
        mbarrier_arrive_expect_bytes(own_full(),
                                     Traits::kFixedRowsBytes + Traits::kTrainedRowsBytes);
        fixed_map.load<typename Traits::FixedTile, Traits::kBlockRows>(fixed_rows(), first_row,
                                                                       own_full());
        trained_map.load<typename Traits::TrainedTile, Traits::kBlockRows>(trained_rows(),
                                                                           first_row, own_full());
    }
    SKL_DEVICE void exchange_rows(const HeadMap& fixed_map, int first_row) const {
        mbarrier_arrive_expect_bytes(own_full(), Traits::kFixedRowsBytes);
        fixed_map.load<typename Traits::FixedTile, Traits::kBlockRows>(fixed_rows(), first_row,
                                                                       own_full());
    }
    // With a trained tile of queries come the statistics of its rows.
    SKL_DEVICE void load_tiles(const HeadMap& fixed_map, const HeadMap& trained_map, int first_row,
                               const float* gStatistics = nullptr, int num_rows = 0) {
        constexpr int kRowBytes = static_cast<int>(sizeof(WeightedStatistics));
        fixed.producer_acquire();
        fixed.producer_expect(Traits::kFixedBytes);
        fixed_map.load<typename Traits::FixedTile, Traits::kBlockCols>(fixed_tile(), first_row,
                                                                       fixed.full());
        fixed.advance();
        trained.producer_acquire();
        trained.producer_expect(Traits::kTrainedBytes + num_rows * kRowBytes);
        trained_map.load<typename Traits::TrainedTile, Traits::kBlockCols>(
            trained_tile(), first_row, trained.full());
        if (num_rows > 0) {
            bulk_load(base + statistics_offset(), gStatistics, num_rows * kRowBytes,
                      trained.full());
        }
        trained.advance();
    }

    // Lets go of a tile that the warpgroup has no use for.
    SKL_DEVICE void skip_tile() {
        fixed.consumer_wait();
        fixed.consumer_release(lane_id());
        fixed.advance();
        trained.consumer_wait();
        trained.consumer_release(lane_id());
        trained.advance();
    }
};

// The right operand of the third product: a tile's rows are the 16 columns of dS of a step.
struct ProductOperand {
    uint64 descriptor;
    int step;  // 16 rows of 128 bytes in units of 16 bytes; 0 where one block serves all

    template <int kRows>
    SKL_DEVICE static ProductOperand tile(uint32 address) {
        return {panel_descriptor(address, kRows * 128), 128};
    }
    // A product with it adds nothing, whatever is finite on the left.
    SKL_DEVICE static ProductOperand zeros(uint32 address) {
        return {panel_descriptor(address, 0) & ~(0x3fffull << 32), 0};
    }
};

// sum += dS times a tile; asynchronous until wgmma_wait.
template <class Element, int kHeadDim, int kSteps>
SKL_DEVICE void add_panels(float (&sum)[2][kHeadDim / 4], const uint32 (&ds)[kSteps][4],
                           const ProductOperand& operand) {
    SKL_UNROLL
    for (int k = 0; k < kSteps; ++k) {
        Wgmma<Element, kHeadDim, 0, 1>::add(sum, ds[k],
                                            descriptor_after(operand.descriptor, k * operand.step));
    }
}

// sum[64 own rows][kTrainedDim] = dS times the trained tiles, over num_tiles tiles. Before them and
// after them the warpgroup lets tiles pass, and its turns with them, that only others work on.
//
// While the matrix units work on S of a tile and then on the third product of the tile before, this
// warpgroup's logits wait for nothing but their own product: the exponentials run under the third
// product. Work (the kernel's) knows where the tiles lie and what a dS is:
//
//   next(smem)                 the next tile is the one to work on; whether from it on the own
//                              rows of the fixed side are others
//   gradients(fixed, trained)  dS over the fixed logits
//   is_border()                whether a row may not see all columns, the same for a warpgroup
//   mask(fixed, trained)       dS of what a row may not see; whether the tile must be scrubbed
//   factor                     what dS is multiplied by
template <class Element, class Traits, class Work>
SKL_DEVICE void sum_gradients(float (&sum)[2][Traits::kTrainedDim / 4], PairSmem<Traits>& smem,
                              Work& work, int num_tiles, int skipped_before = 0,
                              int skipped_after = 0) {
    constexpr int kCols = Traits::kBlockCols, kSide = Traits::kSide, kDim = Traits::kTrainedDim;
    const int lane = lane_id(), consumer = warp_id() / 4 - 1;
    typename Traits::FixedRows fixed_rows;
    typename Traits::TrainedRows trained_rows;
    uint32 own_phase = 0;
    mbarrier_wait(smem.own_full(), own_phase);
    fixed_rows.load(smem.fixed_rows(), 64 * consumer);
    trained_rows.load(smem.trained_rows(), 64 * consumer);

    float fixed[2][kCols / 4], trained[2][kCols / 4];
    // Before the first tile dS is zero.
    uint32 ds[kCols / 16][4] = {};
    ProductOperand operand = ProductOperand::zeros(smem.zeros());
    uint32 last_empty = 0;
    clear(sum);
    const Turns turns = {1 + Traits::kNumConsumers, consumer};
    const int num_turns = skipped_before + num_tiles + skipped_after;
    if ((Traits::kExponentialsInTurn || Traits::kProductsInTurn) && num_turns > 0) turns.start();
    const auto skip_tiles = [&](int first_turn, int num_skipped) {
        SKL_NO_UNROLL
        for (int turn = first_turn; turn < first_turn + num_skipped; ++turn) {
            smem.skip_tile();
            if constexpr (Traits::kProductsInTurn) {
                turns.begin();
                turns.end(turn + 1 < num_turns);
            }
        }
    };
    skip_tiles(0, skipped_before);
    SKL_NO_UNROLL
    for (int i = 0; i < num_tiles; ++i) {
        if (work.next(smem)) {
            __syncwarp();
            mbarrier_arrive_warp(smem.own_empty(), lane);
            mbarrier_wait(smem.own_full(), own_phase ^= 1);
            fixed_rows.load(smem.fixed_rows(), 64 * consumer);
        }
        // S of this tile, then the third product of the last one.
        smem.fixed.consumer_wait();
        if constexpr (Traits::kProductsInTurn) turns.begin();
        wgmma_fence();
        fixed_rows.template multiply<Element, kCols>(fixed, smem.fixed_tile());
        smem.trained.consumer_wait();
        wgmma_fence();
        trained_rows.template multiply<Element, kCols>(trained, smem.trained_tile());
        wgmma_commit();
        add_panels<Element, kDim>(sum, ds, operand);
        wgmma_commit();

        // dS of this tile.
        wgmma_wait<1>();
        if constexpr (Traits::kProductsInTurn) turns.end(skipped_before + i + 1 < num_turns);
        pin_all(fixed);
        pin_all(trained);
        smem.fixed.consumer_release(lane);
        smem.fixed.advance();
        if constexpr (Traits::kExponentialsInTurn) turns.begin();
        work.gradients(fixed, trained);
        if constexpr (Traits::kExponentialsInTurn) {
            pin_all(fixed);  // above the end of the turn
            turns.end(i + 1 < num_tiles);
        }
        bool leaks = false;
        if (work.is_border()) {
            leaks = named_barrier_any<128>(1 + consumer, work.mask(fixed, trained));
        }
        pin_all(fixed);  // above the wait
        wgmma_wait<0>();
        pin_all(fixed);  // what follows writes registers that the third product reads
        pin_all(sum);
        if (i > 0) mbarrier_arrive_warp(last_empty, lane);
        if constexpr (kNeedsRunningFactor<Element, kSide>) fit_to_fp16(fixed, sum, work.factor);
        SKL_UNROLL
        for (int k = 0; k < kCols / 16; ++k) pack_a<Element>(ds[k], fixed[0], fixed[1], k);
        operand = ProductOperand::tile<kCols>(smem.trained_tile());
        if (leaks) {
            SKL_UNROLL
            for (int k = 0; k < kCols / 16; ++k) {
                add_scrubbed<Element, kDim>(sum, ds[k], smem.trained_tile(), kCols, 16 * k, 0);
                SKL_UNROLL
                for (int j = 0; j < 4; ++j) ds[k][j] = 0;
            }
            operand = ProductOperand::zeros(smem.zeros());
        }
        last_empty = smem.trained.empty();
        smem.trained.advance();
        __syncwarp();
    }
    wgmma_fence();
    add_panels<Element, kDim>(sum, ds, operand);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all(sum);
    if (num_tiles > 0) mbarrier_arrive_warp(last_empty, lane);
    skip_tiles(skipped_before + num_tiles, skipped_after);
}
