// What the one-pass pair of both sides shares: shared memory, and the loop of a warpgroup over the
// tiles that stream past its rows.
//
// As in backward_warpgroup.cuh, but both sides get gradients: of the own rows and of what streams
// past them there is a tile of each side, and both take part in a third product. The logits of both
// sides, and with them all exponentials, are made once.
#pragma once
#include "backward_warpgroup.cuh"
#include "base.cuh"
#include "gradient.cuh"
#include "params.cuh"
#include "pipeline.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/sync.cuh"
#include "warpgroup.cuh"

template <int kHeadDim1_, int kHeadDim2_, int kBlockCols_, int kNumStages_, int kSteps1,
          int kSteps2, bool kLogitsFirst_, bool kStreamsQueries>
struct BothTraits {
    static constexpr int kHeadDim1 = kHeadDim1_, kHeadDim2 = kHeadDim2_;
    static constexpr int kNumConsumers = 2, kBlockRows = 64 * kNumConsumers;
    static constexpr int kBlockCols = kBlockCols_, kNumStages = kNumStages_;
    static_assert(kNumStages >= 2, "a tile is still multiplied while the next one makes logits");

    using Tile1 = PanelTile<kHeadDim1>;
    using Tile2 = PanelTile<kHeadDim2>;
    using Rows1 = PanelMixed<kHeadDim1, kSteps1, kBlockRows>;
    using Rows2 = PanelMixed<kHeadDim2, kSteps2, kBlockRows>;

    // Own rows, the ring, zeros, the statistics of streamed queries, barriers, the walk over
    // queries. Everything that the swizzle permutes lies at multiples of 1024.
    static constexpr int kRows1Bytes = Tile1::num_bytes(kBlockRows);
    static constexpr int kRows2Bytes = Tile2::num_bytes(kBlockRows);
    static constexpr int kTile1Bytes = Tile1::num_bytes(kBlockCols);
    static constexpr int kTile2Bytes = Tile2::num_bytes(kBlockCols);
    static constexpr int kStageBytes = kTile1Bytes + kTile2Bytes;
    static constexpr int kStatisticsBytes =  // of a side
        kStreamsQueries ? kBlockCols * static_cast<int>(sizeof(WeightedStatistics)) : 0;
    static constexpr int kRows2Offset = kRows1Bytes;
    static constexpr int kRingOffset = kRows2Offset + kRows2Bytes;
    static constexpr int kZerosOffset = kRingOffset + kNumStages * kStageBytes;
    static constexpr int kZerosBytes = 2048;  // what a product reads, and no less
    static constexpr int kStatisticsOffset = kZerosOffset + kZerosBytes;
    static constexpr int kBarriers = kStatisticsOffset + 2 * kNumStages * kStatisticsBytes;
    static constexpr int kOwnFull = kBarriers + Ring<kNumStages>::kBytes;
    static constexpr int kWalkOffset = kOwnFull + 16;
    static constexpr int kWalkBytes = kStreamsQueries ? 32 : 0;
    static constexpr int kSmemBytes = kWalkOffset + kWalkBytes;

    static constexpr bool kLogitsFirst = kLogitsFirst_;  // see sum_both

    // As in the one-sided pair: turns with whichever is faster, narrow tiles of keys without.
    static constexpr bool kExponentialsInTurn = kStreamsQueries;
    static constexpr bool kProductsInTurn = !kStreamsQueries && kBlockCols == 64;

    // Registers move from the producer to the consumers, out of those that the launch bounds give.
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

// The shared memory of a block, and where each role stands in its ring.
template <class Traits>
struct BothSmem {
    using TileRing = Ring<Traits::kNumStages>;

    uint32 base;
    TileRing ring;

    SKL_DEVICE explicit BothSmem(uint32 base) : base(base), ring(base + Traits::kBarriers) {}

    // Called by all threads, before the barrier that begins the work.
    SKL_DEVICE void init() const {
        if (threadIdx.x == 0) {
            TileRing::init(base + Traits::kBarriers, 4 * Traits::kNumConsumers);
            mbarrier_init(own_full(), 1);
            mbarrier_fence_init();
        }
        if (threadIdx.x < Traits::kZerosBytes / 16) {
            store_shared_128(zeros() + threadIdx.x * 16, {0, 0, 0, 0});
            fence_async_shared();
        }
    }
    SKL_DEVICE uint32 rows1() const { return base; }
    SKL_DEVICE uint32 rows2() const { return base + Traits::kRows2Offset; }
    SKL_DEVICE uint32 tile1() const {
        return base + Traits::kRingOffset + ring.stage * Traits::kStageBytes;
    }
    SKL_DEVICE uint32 tile2() const { return tile1() + Traits::kTile1Bytes; }
    SKL_DEVICE uint32 zeros() const { return base + Traits::kZerosOffset; }
    // Of side 1; those of side 2 lie behind them.
    SKL_DEVICE int statistics_offset() const {
        return Traits::kStatisticsOffset + ring.stage * 2 * Traits::kStatisticsBytes;
    }
    SKL_DEVICE uint32 own_full() const { return base + Traits::kOwnFull; }

    // The producer's part: own rows, and the tiles of both sides as soon as there is room.
    SKL_DEVICE void load_rows(const HeadMap& map1, const HeadMap& map2, int first_row) const {
        mbarrier_arrive_expect_bytes(own_full(), Traits::kRows1Bytes + Traits::kRows2Bytes);
        map1.load<typename Traits::Tile1, Traits::kBlockRows>(rows1(), first_row, own_full());
        map2.load<typename Traits::Tile2, Traits::kBlockRows>(rows2(), first_row, own_full());
    }
    // With tiles of queries come the statistics of their rows.
    SKL_DEVICE void load_tiles(const HeadMap& map1, const HeadMap& map2, int first_row,
                               const float* gStatistics1 = nullptr,
                               const float* gStatistics2 = nullptr, int num_rows = 0) {
        constexpr int kRowBytes = static_cast<int>(sizeof(WeightedStatistics));
        ring.producer_acquire();
        ring.producer_expect(Traits::kStageBytes + 2 * num_rows * kRowBytes);
        map1.load<typename Traits::Tile1, Traits::kBlockCols>(tile1(), first_row, ring.full());
        map2.load<typename Traits::Tile2, Traits::kBlockCols>(tile2(), first_row, ring.full());
        if (num_rows > 0) {
            const uint32 statistics = base + statistics_offset();
            bulk_load(statistics, gStatistics1, num_rows * kRowBytes, ring.full());
            bulk_load(statistics + Traits::kStatisticsBytes, gStatistics2, num_rows * kRowBytes,
                      ring.full());
        }
        ring.advance();
    }

    // Lets go of tiles that the warpgroup has no use for.
    SKL_DEVICE void skip_tile() {
        ring.consumer_wait();
        ring.consumer_release(lane_id());
        ring.advance();
    }
};

// sum_t[64 own rows][kHeadDim_t] = dS_t times the tiles of side t, over num_tiles tiles. Before
// them and after them the warpgroup lets tiles pass, and its turns with them, that only others work
// on.
//
// Where the sums leave registers for the logits of both sides beside the gradients of the tile
// before, the logits go first (kLogitsFirst) and the exponentials run under the third products of
// that tile. Else those come first, S1 behind them, and S2 as soon as they are done: the matrix
// units have S1 to work on meanwhile, and the other consumer's products under the exponentials.
// Work (the kernel's) knows where the tiles lie and what a dS is:
//
//   next(smem)             the next tile is the one to work on
//   is_border()            whether a row may not see all columns, the same for a warpgroup
//   note(s1, s2)           what mask must know of the logits of a border tile
//   gradients(s1, s2)      dS1 and dS2 over the logits
//   mask(ds1, ds2)         zeroes what a row may not see; whether the tile must be scrubbed
//   factor1                what dS1 is multiplied by
template <class Element, class Traits, class Work>
SKL_DEVICE void sum_both(float (&sum1)[2][Traits::kHeadDim1 / 4],
                         float (&sum2)[2][Traits::kHeadDim2 / 4], BothSmem<Traits>& smem,
                         Work& work, int num_tiles, int skipped_before = 0, int skipped_after = 0) {
    constexpr int kCols = Traits::kBlockCols, kDim1 = Traits::kHeadDim1, kDim2 = Traits::kHeadDim2;
    const int lane = lane_id(), consumer = warp_id() / 4 - 1;
    typename Traits::Rows1 rows1;
    typename Traits::Rows2 rows2;
    mbarrier_wait(smem.own_full(), 0);
    rows1.load(smem.rows1(), 64 * consumer);
    rows2.load(smem.rows2(), 64 * consumer);

    float s1[2][kCols / 4], s2[2][kCols / 4];
    // Before the first tile dS is zero.
    uint32 ds1[kCols / 16][4] = {}, ds2[kCols / 16][4] = {};
    ProductOperand operand1 = ProductOperand::zeros(smem.zeros()), operand2 = operand1;
    uint32 last_empty = 0;
    clear(sum1);
    clear(sum2);
    const Turns turns = {1 + Traits::kNumConsumers, consumer};
    const int num_turns = skipped_before + num_tiles + skipped_after;
    constexpr bool kHasTurns = Traits::kExponentialsInTurn || Traits::kProductsInTurn;
    if (kHasTurns && num_turns > 0) turns.start();
    const auto skip_tiles = [&](int first_turn, int num_skipped) {
        SKL_NO_UNROLL
        for (int turn = first_turn; turn < first_turn + num_skipped; ++turn) {
            smem.skip_tile();
            if constexpr (kHasTurns) {
                turns.begin();
                turns.end(turn + 1 < num_turns);
            }
        }
    };
    skip_tiles(0, skipped_before);
    SKL_NO_UNROLL
    for (int i = 0; i < num_tiles; ++i) {
        work.next(smem);
        const bool is_followed = skipped_before + i + 1 < num_turns;
        if constexpr (Traits::kLogitsFirst) {
            smem.ring.consumer_wait();
            if constexpr (Traits::kProductsInTurn) turns.begin();
            wgmma_fence();
            rows1.template multiply<Element, kCols>(s1, smem.tile1());
            rows2.template multiply<Element, kCols>(s2, smem.tile2());
            wgmma_commit();
            add_panels<Element, kDim1>(sum1, ds1, operand1);
            add_panels<Element, kDim2>(sum2, ds2, operand2);
            wgmma_commit();
            wgmma_wait<1>();
        } else {
            // The third products of the last tile, then S of this one.
            if constexpr (Traits::kProductsInTurn) turns.begin();
            wgmma_fence();
            add_panels<Element, kDim1>(sum1, ds1, operand1);
            add_panels<Element, kDim2>(sum2, ds2, operand2);
            wgmma_commit();
            smem.ring.consumer_wait();
            wgmma_fence();
            rows1.template multiply<Element, kCols>(s1, smem.tile1());
            wgmma_commit();
            wgmma_wait<1>();
            pin_all(sum1);
            pin_all(sum2);
            if (i > 0) mbarrier_arrive_warp(last_empty, lane);
            wgmma_fence();
            rows2.template multiply<Element, kCols>(s2, smem.tile2());
            wgmma_commit();
            wgmma_wait<0>();
        }
        if constexpr (Traits::kProductsInTurn) turns.end(is_followed);
        pin_all(s1);
        pin_all(s2);

        // dS of this tile.
        const bool is_border = work.is_border();
        if (is_border) work.note(s1, s2);
        if constexpr (Traits::kExponentialsInTurn) turns.begin();
        work.gradients(s1, s2);
        if constexpr (Traits::kExponentialsInTurn) {
            pin_all(s1);  // above the end of the turn
            pin_all(s2);
            turns.end(is_followed);
        }
        bool leaks = false;
        if (is_border) leaks = named_barrier_any<128>(1 + consumer, work.mask(s1, s2));
        if constexpr (Traits::kLogitsFirst) {
            pin_all(s1);  // above the wait
            pin_all(s2);
            wgmma_wait<0>();
            pin_all(s1);  // what follows writes registers that the third products read
            pin_all(s2);
            pin_all(sum1);
            pin_all(sum2);
            if (i > 0) mbarrier_arrive_warp(last_empty, lane);
        }
        if constexpr (kNeedsRunningFactor<Element, 1>) fit_to_fp16(s1, sum1, work.factor1);
        SKL_UNROLL
        for (int k = 0; k < kCols / 16; ++k) {
            pack_a<Element>(ds1[k], s1[0], s1[1], k);
            pack_a<Element>(ds2[k], s2[0], s2[1], k);
        }
        operand1 = ProductOperand::tile<kCols>(smem.tile1());
        operand2 = ProductOperand::tile<kCols>(smem.tile2());
        if (leaks) {
            SKL_UNROLL
            for (int k = 0; k < kCols / 16; ++k) {
                add_scrubbed<Element, kDim1>(sum1, ds1[k], smem.tile1(), kCols, 16 * k, 0);
                add_scrubbed<Element, kDim2>(sum2, ds2[k], smem.tile2(), kCols, 16 * k, 0);
                SKL_UNROLL
                for (int j = 0; j < 4; ++j) ds1[k][j] = ds2[k][j] = 0;
            }
            operand1 = operand2 = ProductOperand::zeros(smem.zeros());
        }
        last_empty = smem.ring.empty();
        smem.ring.advance();
        __syncwarp();
    }
    wgmma_fence();
    add_panels<Element, kDim1>(sum1, ds1, operand1);
    add_panels<Element, kDim2>(sum2, ds2, operand2);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all(sum1);
    pin_all(sum2);
    if (num_tiles > 0) mbarrier_arrive_warp(last_empty, lane);
    skip_tiles(skipped_before + num_tiles, skipped_after);
}
