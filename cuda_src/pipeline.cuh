// A ring of buffers between producer warps, of which a single one asks the copy engine to fill them
// or several write themselves, and the warps that read them.
//
// full[stage] completes when the bytes have landed, empty[stage] when every consumer warp has let
// go. A phase bit that flips with every round tells a new filling from the last one.
//
// Turns keep two warpgroups out of step.
#pragma once
#include "base.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"

template <int kNumStages>
struct Ring {
    static constexpr int kBytes = 2 * 8 * kNumStages;
    uint32 barriers;
    int stage = 0;
    uint32 phase = 0;

    SKL_DEVICE explicit Ring(uint32 barriers) : barriers(barriers) {}

    // Without producer warps one thread asks the copy engine.
    SKL_DEVICE static void init(uint32 barriers, int num_consumer_warps,
                                int num_producer_warps = 0) {
        const int num_filling = num_producer_warps == 0 ? 1 : num_producer_warps * kArrivalsOfWarp;
        for (int i = 0; i < kNumStages; ++i) {
            mbarrier_init(barriers + 8 * i, num_filling);
            mbarrier_init(barriers + 8 * (kNumStages + i), num_consumer_warps * kArrivalsOfWarp);
        }
    }
    SKL_DEVICE uint32 full() const { return barriers + 8 * stage; }
    SKL_DEVICE uint32 empty() const { return barriers + 8 * (kNumStages + stage); }
    SKL_DEVICE void advance() {
        if (++stage == kNumStages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // A fresh ring is empty: the producer's first round finds the phase before the first one
    // complete.
    SKL_DEVICE void producer_acquire() const { mbarrier_wait(empty(), phase ^ 1); }
    SKL_DEVICE void producer_expect(uint32 num_bytes) const {
        mbarrier_arrive_expect_bytes(full(), num_bytes);
    }
    // Where warps fill the buffer themselves.
    SKL_DEVICE void producer_commit(int lane) const { mbarrier_arrive_warp(full(), lane); }
    SKL_DEVICE void consumer_wait() const { mbarrier_wait(full(), phase); }
    SKL_DEVICE void consumer_release(int lane) const { release(stage, lane); }
    SKL_DEVICE void release(int which_stage, int lane) const {
        mbarrier_arrive_warp(barriers + 8 * (kNumStages + which_stage), lane);
    }
};

// Two warpgroups that do something in turn, as often as each other, the first one first. Takes two
// named barriers.
struct Turns {
    int barrier, group;  // 0 or 1

    // Before the first turn, unless there is none.
    SKL_DEVICE void start() const {
        if (group == 1) named_barrier_arrive<256>(barrier);
    }
    SKL_DEVICE void begin() const { named_barrier_sync<256>(barrier + group); }
    // Nobody waits for the end of the last.
    SKL_DEVICE void end(bool is_followed) const {
        if (group == 0 || is_followed) named_barrier_arrive<256>(barrier + 1 - group);
    }
};
