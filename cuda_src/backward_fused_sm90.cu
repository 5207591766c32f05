// backward_fused_sm90: what backward_fused_sm80 computes, by Hopper's warpgroup products and copy
// engine.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i     dq_t,i = scale_t dkl_i sum_j ds_t,ij k_t,j
//
// with t = kSide and ds as in gradient.cuh. Blocks add their parts of dQ to a float32 scratch;
// backward_finish scales and rounds it. Ordered, they do so one after the other in the order of
// their launch, and the bits are the same in every run; else the last bits of dQ differ. dK has a
// fixed order either way. Without kHasDk only dQ is made.
//
// Grid: one block per (batch, key head of side t, block of 64 kNumConsumers keys). Warpgroup 0
// produces: one lane asks the copy engine for tiles; ordered, two more warps wait for the blocks
// before and count this one. Warpgroup 1 sums dQ. Each further warpgroup consumes: it owns 64 keys.
// Nothing of dQ lies on the consumers' way.
//
//   1. K1 and K2 are fetched, and the first kRegisterSteps steps of both come to the consumers'
//   registers. A group of heads may share K_t and not the other: that one is exchanged on the way.
//   2. Tiles of 64 queries, Q1 and Q2 with their row statistics, run through a ring of kNumStages
//   buffers, head after head. Blocks of one head start at different tiles, or all would add to the
//   same rows of dQ at once; ordered ones follow each other.
//   3. S1^T = K1 Q1^T and S2^T = K2 Q2^T of the next tile are multiplied together with
//   4. dK += dS^T Q_t of the last one, whose left operand never leaves the registers.
//   5. dS^T of the last tile goes to one of kNumBuffers buffers for the warpgroup of dQ.
//   6. The logits become dkl dS^T, zero where a query may not see the key. The consumers take turns
//   at it: the matrix units work for one while the special function units work for the other.
//   7. The warpgroup of dQ multiplies dQ = dS K_t, 64 columns at a time, and adds them to the
//   scratch; ordered, once all blocks before have.
//   8. dK is scaled by scale_t and written.
#include "fragment.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "pipeline.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "schedule.cuh"
#include "softcap.cuh"
#include "warpgroup.cuh"

template <class Element_, int kSide_, int kHeadDim1_, int kHeadDim2_, int kNumConsumers_,
          int kNumStages_, int kNumBuffers_, int kRegisterSteps, bool kIsOrdered_, Mask kMask_>
struct FusedTraits {
    using Element = Element_;
    static constexpr int kSide = kSide_, kHeadDim1 = kHeadDim1_, kHeadDim2 = kHeadDim2_;
    static constexpr int kNumConsumers = kNumConsumers_, kNumStages = kNumStages_,
                         kNumBuffers = kNumBuffers_;
    static constexpr int kHeadDim = kSide == 1 ? kHeadDim1 : kHeadDim2;
    static constexpr int kBlockQ = 64, kBlockK = 64 * kNumConsumers;
    static constexpr bool kIsOrdered = kIsOrdered_;
    using Walk = typename Choose<kIsOrdered, OrderedWalk<kSide, kBlockK, kBlockQ>,
                                 StaggeredWalk<kSide, kBlockK, kBlockQ>>::Type;
    static constexpr Mask kMask = kMask_;
    using Range = KeyRange<kMask>;

    static constexpr int kSteps1 = min_of(kRegisterSteps, kHeadDim1 / 16);
    using Keys1 = PanelMixed<kHeadDim1, kSteps1, kBlockK>;
    using Keys2 = PanelMixed<kHeadDim2, kRegisterSteps - kSteps1, kBlockK>;

    // Shared memory: everything that the swizzle permutes lies at multiples of 1024.
    static constexpr int kK1Bytes = PanelTile<kHeadDim1>::num_bytes(kBlockK);
    static constexpr int kK2Bytes = PanelTile<kHeadDim2>::num_bytes(kBlockK);
    static constexpr int kKeysOffset = kSide == 1 ? 0 : kK1Bytes;  // of the side with gradients
    static constexpr int kRingOffset = kK1Bytes + kK2Bytes;
    static constexpr int kQ1Bytes = PanelTile<kHeadDim1>::num_bytes(kBlockQ);
    static constexpr int kQueryBytes = kQ1Bytes + PanelTile<kHeadDim2>::num_bytes(kBlockQ);
    static constexpr int kQueriesOffset = kSide == 1 ? 0 : kQ1Bytes;  // in a stage, likewise
    static constexpr int kStageBytes =
        kQueryBytes + kBlockQ * static_cast<int>(sizeof(WeightedStatistics));
    static constexpr int kGradientOffset = kRingOffset + kNumStages * kStageBytes;
    static constexpr int kGradientBytes = kBlockK * kBlockQ * 2;
    // A warp's buffers for 16 rows and 32 columns of dQ on their way to the copy engine. Of wide
    // heads they go straight from registers to the scratch: there the traffic of shared memory is
    // what limits the kernel, of narrow ones the instructions. Ordered, too: the copy engine would
    // have to be waited for.
    static constexpr bool kIsStaged = kHeadDim <= 64 && !kIsOrdered;
    static constexpr int kNumSums = kIsStaged ? 3 : 0, kSumBytes = 16 * 32 * 4;
    static constexpr int kSumOffset = kGradientOffset + kNumBuffers * kGradientBytes;
    static constexpr int kRingBarriers = kSumOffset + 4 * kNumSums * kSumBytes;
    static constexpr int kGradientBarriers = kRingBarriers + Ring<kNumStages>::kBytes;
    static constexpr int kKeysFull = kGradientBarriers + Ring<kNumBuffers>::kBytes;
    static constexpr int kKeysEmpty = kKeysFull + 8;
    // Ordered: between the warpgroup of dQ and the warp that waits for the blocks before, and the
    // one that counts this one.
    static constexpr int kMayAddBarriers = kKeysEmpty + 8;
    static constexpr int kAddedBarriers = kMayAddBarriers + (kIsOrdered ? Ring<1>::kBytes : 0);
    // A factor a warp and buffer.
    static constexpr int kFactorOffset = kAddedBarriers + (kIsOrdered ? Ring<1>::kBytes : 0);
    static constexpr int kNumWarps = 4 * kNumConsumers;
    static constexpr int kSmemBytes = kFactorOffset + 4 * kNumWarps * kNumBuffers;

    // Barrier 0 is that of __syncthreads; the consumers' follow.
    static constexpr int kSumBarrier = 1, kConsumerBarrier = 2, kTurnBarrier = 4;
    static constexpr bool kHasFactors = kNeedsRunningFactor<Element, kSide>;

    // Columns of dQ that are multiplied at a time.
    static constexpr int kSumCols = min_of(kHeadDim, 64);

    // Registers move from the producer and the warpgroup of dQ to the consumers; the sum may not
    // pass the file's 64 K.
    static constexpr int kProducerRegisters = 24, kSumRegisters = 72, kConsumerRegisters = 208;
    static_assert(kNumConsumers == 2, "2 x 208 + 72 + 24 registers for four warpgroups");
};

// The same for all threads, and the compiler has to see that it is: what it knows to be uniform
// takes none of the accumulators' registers, and products whose place is known to be uniform follow
// each other at once. Each role starts a walk of its own, or its places would stay alive in all of
// them.
template <class Traits>
SKL_DEVICE decltype(auto) range_of_block(const BackwardParams& params) {
    return range_of_entry<Traits::kMask>(params, batch_of_keys<Traits::kSide>(params, blockIdx.x));
}

template <class Traits>
SKL_DEVICE typename Traits::Walk walk_of_block(const BackwardParams& params) {
    typename Traits::Walk walk;
    walk.start(params, range_of_block<Traits>(params), blockIdx.x);
    return walk;
}

// 1. and 2. Of one warp.
template <class Traits>
SKL_DEVICE void produce(const InputMaps& maps, const BackwardParams& params, uint32 base) {
    const auto walk = walk_of_block<Traits>(params);
    using Tile1 = PanelTile<Traits::kHeadDim1>;
    using Tile2 = PanelTile<Traits::kHeadDim2>;
    constexpr int kBlockQ = Traits::kBlockQ, kBlockK = Traits::kBlockK;
    const int lane = lane_id();
    const uint32 keys_full = base + Traits::kKeysFull;
    Ring<Traits::kNumStages> ring(base + Traits::kRingBarriers);
    int end_of_run = walk.head_begin;
    SKL_NO_UNROLL
    for (int head_idx = walk.head_begin; head_idx < walk.head_end; ++head_idx) {
        if (head_idx == end_of_run) {
            const bool is_first = head_idx == walk.head_begin;
            if (!is_first) {
                mbarrier_wait(base + Traits::kKeysEmpty, (walk.run_of(head_idx) - 1) & 1);
            }
            const bool brings1 = is_first || Traits::kSide == 2;
            const bool brings2 = is_first || Traits::kSide == 1;
            if (lane == 0) {
                mbarrier_arrive_expect_bytes(
                    keys_full, (brings1 ? Traits::kK1Bytes : 0) + (brings2 ? Traits::kK2Bytes : 0));
                if (brings1) {
                    Tile1::template load<kBlockK>(
                        base, maps.k1, walk.first_key,
                        map_index(params.k1.head_stride, head_idx / params.group1),
                        map_index(params.k1.batch_stride, walk.batch_idx), keys_full);
                }
                if (brings2) {
                    Tile2::template load<kBlockK>(
                        base + Traits::kK1Bytes, maps.k2, walk.first_key,
                        map_index(params.k2.head_stride, head_idx / params.group2),
                        map_index(params.k2.batch_stride, walk.batch_idx), keys_full);
                }
            }
            end_of_run = walk.end_of_run(head_idx);
        }
        const int num_queries = params.range.num_queries;
        const float* statistics =
            params.row_statistics +
            4 * (static_cast<int64>(walk.batch_idx) * params.num_heads + head_idx) * num_queries;
        int first_query = walk.start_query;
        SKL_NO_UNROLL
        for (int i = 0; i < walk.num_tiles; ++i, first_query = walk.next_query(first_query)) {
            ring.producer_acquire();
            if (lane == 0) {
                const uint32 sQ1 = base + Traits::kRingOffset + ring.stage * Traits::kStageBytes;
                const uint32 rows_bytes = min_of(kBlockQ, num_queries - first_query) *
                                          static_cast<int>(sizeof(WeightedStatistics));
                ring.producer_expect(Traits::kQueryBytes + rows_bytes);
                Tile1::template load<kBlockQ>(
                    sQ1, maps.q1, first_query, map_index(params.q1.head_stride, head_idx),
                    map_index(params.q1.batch_stride, walk.batch_idx), ring.full());
                Tile2::template load<kBlockQ>(sQ1 + Traits::kQ1Bytes, maps.q2, first_query,
                                              map_index(params.q2.head_stride, head_idx),
                                              map_index(params.q2.batch_stride, walk.batch_idx),
                                              ring.full());
                bulk_load(sQ1 + Traits::kQueryBytes,
                          statistics + 4 * static_cast<int64>(first_query), rows_bytes,
                          ring.full());
            }
            __syncwarp();
            ring.advance();
        }
    }
}

// Whether a mask runs through the tile of these keys and queries.
template <class Range>
SKL_DEVICE bool is_border(const Range& range, const Interval& seeing_all, int first_key,
                          int num_keys, int first_query, int num_queries) {
    if constexpr (Range::kIsRagged) {
        return first_query < seeing_all.begin || first_query + num_queries > seeing_all.end;
    } else {
        const Interval all = range.all_of(first_query, first_query + num_queries - 1);
        return first_key < all.begin || first_key + num_keys > all.end ||
               first_query + num_queries > range.num_queries;
    }
}

// The keys of the side with gradients that hold a NaN or Inf: a bit for each of the rows
// threadIdx.x % 128 + 128 i.
template <class Traits>
SKL_DEVICE uint32 find_broken_keys(const unsigned char* keys) {
    uint32 broken = 0;
    SKL_NO_UNROLL
    for (int row = threadIdx.x % 128, bit = 1; row < Traits::kBlockK; row += 128, bit <<= 1) {
        SKL_NO_UNROLL
        for (int chunk = 0; chunk < PanelTile<Traits::kHeadDim>::kPanels * 8; ++chunk) {
            const uint4 v = *reinterpret_cast<const uint4*>(
                keys + panel_address(0, Traits::kBlockK, row, chunk / 8, chunk % 8));
            using Element = typename Traits::Element;
            if (finite_or_zero<Element>(v.x) != v.x || finite_or_zero<Element>(v.y) != v.y ||
                finite_or_zero<Element>(v.z) != v.z || finite_or_zero<Element>(v.w) != v.w) {
                broken |= bit;
            }
        }
    }
    return broken;
}

// Writes NaN into a buffer of dS^T for every query that sees a broken key: the product for dQ is
// about to read such keys as zero, for the sake of the queries that do not see them.
template <class Traits>
SKL_DEVICE void mark_broken_keys(unsigned char* gradients, uint32 broken,
                                 const typename Traits::Range& range, int first_key,
                                 int first_query) {
    SKL_NO_UNROLL
    for (int row = threadIdx.x % 128; broken != 0; row += 128, broken >>= 1) {
        if ((broken & 1) == 0) continue;
        if (first_key + row >= range.num_keys) continue;
        const Interval queries = range.queries_of(first_key + row, first_key + row);
        const int end = min_of(Traits::kBlockQ, queries.end - first_query);
        SKL_NO_UNROLL
        for (int col = max_of(0, queries.begin - first_query); col < end; ++col) {
            *reinterpret_cast<uint16*>(
                gradients + panel_address(0, Traits::kBlockK, row, 0, col / 8) + col % 8 * 2) =
                0x7fff;
        }
    }
}

// Warps of consumers that met too large a gradient have lowered their factors; dQ sums over all
// keys, so the others' rows of dS^T follow. Returns the factor of all.
template <class Traits>
SKL_DEVICE float equalize_factors(unsigned char* gradients, const float* factors) {
    float lowest = factors[0], highest = factors[0];
    SKL_UNROLL
    for (int i = 1; i < Traits::kNumWarps; ++i) {
        lowest = fminf(lowest, factors[i]);
        highest = fmaxf(highest, factors[i]);
    }
    if (lowest == highest) return lowest;
    SKL_NO_UNROLL
    for (int row = threadIdx.x % 128; row < Traits::kBlockK; row += 128) {
        const float scale = lowest / factors[row / 16];
        const uint32 scales = pack<fp16>(scale, scale);
        SKL_NO_UNROLL
        for (int i = 0; i < Traits::kBlockQ / 2; ++i) {
            auto* pair = reinterpret_cast<uint32*>(gradients + row * 128 + (i ^ (row & 31)) * 4);
            *pair = multiply_fp16x2(*pair, scales);
        }
    }
    fence_async_shared();
    named_barrier_sync<128>(Traits::kSumBarrier);
    return lowest;
}

// Four floats of dQ, in units of 1. Their bits go to shared memory by way of an array: given one by
// one, ptxas moves 64 registers of the consumers in every tile (README, Measured).
template <class Element>
struct Sums {
    float v[4];
    SKL_DEVICE Sums(float a, float b, float c, float d, float unscale) : v{a, b, c, d} {
        SKL_UNROLL
        for (int i = 0; i < 4; ++i) v[i] = is_same<Element, fp16> ? v[i] * unscale : v[i];
    }
    SKL_DEVICE void store(uint32 address) const {
        uint32 bits[4];
        SKL_UNROLL
        for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(v[i]);
        store_shared_128(address, bits);
    }
    SKL_DEVICE void add_to(float* address) const {
        reduce_add_global(address, v[0], v[1], v[2], v[3]);
    }
};

// dQ = dS K_t, of a panel of K_t.
template <class Traits>
SKL_DEVICE void multiply_dq(float (&dq)[2][Traits::kSumCols / 4], uint32 sGradient, uint32 sPanel) {
    using Product = Wgmma<typename Traits::Element, Traits::kSumCols, 1, 1>;
    const uint64 a = panel_descriptor(sGradient), b = panel_descriptor(sPanel);
    wgmma_fence();
    Product::start(dq, a, b);
    SKL_UNROLL
    for (int k = 1; k < Traits::kBlockK / 16; ++k) Product::add(dq, a + k * 128, b + k * 128);
    wgmma_commit();
    wgmma_wait<0>();
    pin_all(dq);
}

// Columns [col, col + 32), warp by warp: where elements of K_t are broken.
template <class Traits>
SKL_DEVICE void multiply_dq_scrubbed(float (&dq)[2][8], uint32 sGradient, uint32 sK, int col) {
    const int lane = lane_id(), chunk = 2 * (warp_id() % 4) + ((lane >> 3) & 1);
    clear(dq);
    SKL_NO_UNROLL
    for (int k = 0; k < Traits::kBlockK / 16; ++k) {
        uint32 a[4];
        const int row = 16 * k + (lane & 7) + (lane >> 4) * 8;
        ldmatrix_x4_trans(a, panel_address(sGradient, Traits::kBlockK, row, 0, chunk));
        add_scrubbed<typename Traits::Element, 32>(dq, a, sK, Traits::kBlockK, 16 * k, col / 16);
    }
}

// Calls visit(where it stands how many blocks have added to a tile, how many add before this one)
// for tile after tile of the block.
template <class Traits, class Visit>
SKL_DEVICE void visit_counts(const BackwardParams& params, Visit&& visit) {
    const auto walk = walk_of_block<Traits>(params);
    const auto& range = range_of_block<Traits>(params);
    const int tiles_per_head = ceil_div(range.num_queries, Traits::kBlockQ);
    uint32* of_head =
        params.dq_counts +
        (static_cast<int64>(walk.batch_idx) * params.num_heads + walk.head_begin) * tiles_per_head;
    SKL_NO_UNROLL
    for (int head_idx = walk.head_begin; head_idx < walk.head_end; ++head_idx) {
        int first_query = walk.start_query;
        SKL_NO_UNROLL
        for (int i = 0; i < walk.num_tiles; ++i, first_query = walk.next_query(first_query)) {
            visit(of_head + first_query / Traits::kBlockQ, walk.num_before(range, first_query));
        }
        of_head += tiles_per_head;
    }
}

// A warp each waits for the blocks before and counts this one: to memory that is a long way and
// back, on which the warpgroup of dQ need not go.
template <class Traits>
SKL_DEVICE void await_blocks(const BackwardParams& params, uint32 base) {
    Ring<1> may_add(base + Traits::kMayAddBarriers);
    visit_counts<Traits>(params, [&](const uint32* count, uint32 num_before) {
        while (load_acquire(count) != num_before) {
        }
        may_add.producer_acquire();
        __syncwarp();
        may_add.producer_commit(lane_id());
        may_add.advance();
    });
}

template <class Traits>
SKL_DEVICE void count_block(const BackwardParams& params, uint32 base) {
    Ring<1> added(base + Traits::kAddedBarriers);
    visit_counts<Traits>(params, [&](uint32* count, uint32) {
        added.consumer_wait();
        __syncwarp();
        if (lane_id() == 0) add_release(count, 1);
        added.consumer_release(lane_id());
        added.advance();
    });
}

// 7. Of a warpgroup; broken marks the thread's broken keys, if there are any in the block.
template <class Traits, bool kIsBroken>
SKL_DEVICE void sum_tiles(const BackwardParams& params, const typename Traits::Walk& walk,
                          unsigned char* smem, uint32 base, uint32 broken) {
    using Element = typename Traits::Element;
    constexpr int kCols = kIsBroken ? 32 : Traits::kSumCols;
    const int lane = lane_id(), warp = warp_id() % 4;
    const uint32 sSums = base + Traits::kSumOffset + warp * Traits::kNumSums * Traits::kSumBytes;
    const auto& range = range_of_block<Traits>(params);
    float unscale = 1.f / call_factor<Element>(params.max_dkl);
    Ring<Traits::kNumBuffers> gradients(base + Traits::kGradientBarriers);
    [[maybe_unused]] Ring<1> may_add(base + Traits::kMayAddBarriers);
    [[maybe_unused]] Ring<1> added(base + Traits::kAddedBarriers);
    uint32 sum_offset = 0;
    const int row_tiles_per_head = ceil_div(range.num_queries, 16);
    // Row tiles are counted through all heads.
    int first_row_tile = (walk.batch_idx * params.num_heads + walk.head_begin) * row_tiles_per_head;
    int tiles_left = (walk.head_end - walk.head_begin) * walk.num_tiles;
    int first_query = walk.start_query;
    SKL_NO_UNROLL
    for (; tiles_left > 0; --tiles_left) {
        gradients.consumer_wait();
        const int gradient_offset =
            Traits::kGradientOffset + gradients.stage * Traits::kGradientBytes;
        if constexpr (Traits::kHasFactors) {
            const auto* factors = reinterpret_cast<const float*>(smem + Traits::kFactorOffset);
            unscale = 1.f / equalize_factors<Traits>(smem + gradient_offset,
                                                     factors + gradients.stage * Traits::kNumWarps);
        }
        if constexpr (kIsBroken) {
            mark_broken_keys<Traits>(smem + gradient_offset, broken, range, walk.first_key,
                                     first_query);
            named_barrier_sync<128>(Traits::kSumBarrier);
        }
        const bool has_rows = first_query / 16 + warp < row_tiles_per_head;
        const int row_tile = first_row_tile + first_query / 16 + warp;
        SKL_NO_UNROLL
        for (int col = 0; col < Traits::kHeadDim; col += kCols) {
            float dq[2][kCols / 4];
            const uint32 sK = base + Traits::kKeysOffset;
            if constexpr (kIsBroken) {
                multiply_dq_scrubbed<Traits>(dq, base + gradient_offset, sK, col);
            } else {
                multiply_dq<Traits>(dq, base + gradient_offset,
                                    sK + col / 64 * (Traits::kBlockK * 128));
            }
            if (col + kCols >= Traits::kHeadDim) {
                __syncwarp();
                gradients.consumer_release(lane);
            }
            if (Traits::kIsOrdered && col == 0) may_add.consumer_wait();
            if (!has_rows) continue;
            SKL_UNROLL
            for (int half = 0; half < kCols / 32; ++half) {
                if (col + 32 * half >= Traits::kHeadDim) break;
                float* gSum = params.dq_scratch +
                              row_tile * static_cast<int64>(16 * Traits::kHeadDim) +
                              16 * (col + 32 * half);
                const uint32 sSum = sSums + sum_offset;
                if constexpr (Traits::kIsStaged) {
                    if (lane == 0) bulk_wait_read<Traits::kNumSums - 1>();
                    __syncwarp();
                }
                SKL_UNROLL
                for (int i = 0; i < 4; ++i) {
                    const int e = 8 * half + 2 * i;
                    const Sums<Element> sums(dq[0][e], dq[0][e + 1], dq[1][e], dq[1][e + 1],
                                             unscale);
                    if constexpr (Traits::kIsStaged) {
                        sums.store(sSum + i * 512 + lane * 16);
                    } else {
                        sums.add_to(gSum + i * 128 + lane * 4);
                    }
                }
                if constexpr (Traits::kIsStaged) {
                    fence_async_shared();
                    __syncwarp();
                    if (lane == 0) bulk_reduce_add(gSum, sSum, Traits::kSumBytes);
                    sum_offset += Traits::kSumBytes;
                    if (sum_offset == Traits::kNumSums * Traits::kSumBytes) sum_offset = 0;
                }
            }
        }
        if constexpr (Traits::kIsOrdered) {
            added.producer_acquire();
            __syncwarp();
            may_add.consumer_release(lane);
            added.producer_commit(lane);
            may_add.advance();
            added.advance();
        }
        gradients.advance();
        first_query = walk.next_query(first_query);
        if (first_query == walk.start_query) first_row_tile += row_tiles_per_head;
    }
    if (Traits::kIsStaged && lane == 0) bulk_wait();
}

template <class Traits>
SKL_DEVICE void sum_dq(const BackwardParams& params, unsigned char* smem, uint32 base) {
    const auto walk = walk_of_block<Traits>(params);
    if (walk.head_begin == walk.head_end) return;
    mbarrier_wait(base + Traits::kKeysFull, 0);
    const uint32 broken = find_broken_keys<Traits>(smem + Traits::kKeysOffset);
    if (named_barrier_any<128>(Traits::kSumBarrier, broken != 0)) {
        sum_tiles<Traits, true>(params, walk, smem, base, broken);
    } else {
        sum_tiles<Traits, false>(params, walk, smem, base, 0);
    }
}

// Steps 3 to 6 and 8. Of a warpgroup, which owns 64 keys.
template <class Traits, bool kHasDk, bool kHasSoftcap>
SKL_DEVICE void consume(const BackwardParams& params, const unsigned char* smem, uint32 base) {
    const auto walk = walk_of_block<Traits>(params);
    using Element = typename Traits::Element;
    constexpr int kSide = Traits::kSide, kHeadDim = Traits::kHeadDim, kBlockQ = Traits::kBlockQ;
    constexpr int kElements = kBlockQ / 4;
    const auto& range = range_of_block<Traits>(params);
    const int lane = lane_id(), warp = warp_id() - 8, group = warp / 4;
    const int first_key = walk.first_key + 64 * group,
              first_key_of_warp = walk.first_key + 16 * warp;
    const Interval seeing_all = queries_of_all(range, first_key, 64);
    Ring<Traits::kNumStages> ring(base + Traits::kRingBarriers);
    Ring<Traits::kNumBuffers> gradients(base + Traits::kGradientBarriers);
    float factor = call_factor<Element>(params.max_dkl);
    float dk[2][kHeadDim / 4];
    clear(dk);
    typename Traits::Keys1 keys1;
    typename Traits::Keys2 keys2;
    float s1[2][kElements], s2[2][kElements];
    auto& trained = kSide == 1 ? s1 : s2;
    auto& ds = kSide == 1 ? s2 : s1;
    uint32 fragments[kBlockQ / 16][4];  // dS^T as the left operand

    const auto stage_offset = [&](int stage) {
        return Traits::kRingOffset + stage * Traits::kStageBytes;
    };
    const auto multiply_logits = [&](int stage) {
        const uint32 sQ1 = base + stage_offset(stage);
        keys1.template multiply<Element, kBlockQ>(s1, sQ1);
        keys2.template multiply<Element, kBlockQ>(s2, sQ1 + Traits::kQ1Bytes);
        wgmma_commit();
    };
    const auto multiply_dk = [&](int stage) {
        if constexpr (kHasDk) {
            const uint64 queries = panel_descriptor(
                base + stage_offset(stage) + Traits::kQueriesOffset, kBlockQ * 128);
            SKL_UNROLL
            for (int k = 0; k < kBlockQ / 16; ++k) {
                Wgmma<Element, kHeadDim, 0, 1>::add(dk, fragments[k], queries + k * 128);
            }
        }
        wgmma_commit();
    };
    // Both consumers have as many turns; the first begins.
    int turns_left = (walk.head_end - walk.head_begin) * walk.num_tiles;
    const Turns turns = {Traits::kTurnBarrier, group};
    if (turns_left > 0) turns.start();
    // Turns logits into dkl dS^T. Returns, to the whole warpgroup, whether a masked query may hold
    // a NaN or Inf.
    const auto find_gradients = [&](int stage, int first_query) {
        turns.begin();
        const auto* rows = reinterpret_cast<const WeightedStatistics*>(smem + stage_offset(stage) +
                                                                       Traits::kQueryBytes);
        take_trained<kSide, kHasSoftcap, false>(
            ds, trained, params, [&](int line, int e, const CappedLogit& logit) {
                WeightedStatistics row = rows[col_of_element(e)];
                if constexpr (is_same<Element, fp16>) row.weight *= factor;
                ds[line][e] = product_gradient<kSide, kHasSoftcap>(logit, ds[line][e], row, params);
            });
        pin_all(ds);  // above the end of the turn
        turns.end(turns_left > 1);
        --turns_left;
        if (!is_border(range, seeing_all, first_key, 64, first_query, kBlockQ)) return false;
        int first_key_here = first_key_of_warp;
        pin(first_key_here);  // or what the masks make of it stays in registers all the time
        return named_barrier_any<128>(Traits::kConsumerBarrier + group,
                                      mask_transposed(ds, range, first_key_here, first_query));
    };
    const auto round_gradients = [&]() {
        if constexpr (Traits::kHasFactors) fit_to_fp16(ds, dk, factor);
        SKL_UNROLL
        for (int k = 0; k < kBlockQ / 16; ++k) pack_a<Element>(fragments[k], ds[0], ds[1], k);
    };
    const auto pass_on_gradients = [&]() {
        gradients.producer_acquire();
        // The swizzle is an exclusive or of address bits, and so is a step of two chunks.
        const uint32 sRow =
            panel_address(base + Traits::kGradientOffset + gradients.stage * Traits::kGradientBytes,
                          Traits::kBlockK, 16 * warp + (lane & 15), 0, lane >> 4);
        SKL_UNROLL
        for (int k = 0; k < kBlockQ / 16; ++k) stmatrix_x4(sRow ^ (k << 5), fragments[k]);
        if constexpr (Traits::kHasFactors) {
            const uint32 sFactor =
                base + Traits::kFactorOffset + 4 * (gradients.stage * Traits::kNumWarps + warp);
            if (lane == 0) store_shared_32(sFactor, __float_as_uint(factor));
        }
        fence_async_shared();
        __syncwarp();
        gradients.producer_commit(lane);
        gradients.advance();
    };
    const auto release_queries = [&](int stage) {
        __syncwarp();
        ring.release(stage, lane);
    };

    SKL_NO_UNROLL
    for (int head_idx = walk.head_begin; head_idx < walk.head_end;
         head_idx = walk.end_of_run(head_idx)) {
        int tiles_left = (walk.end_of_run(head_idx) - head_idx) * walk.num_tiles;
        int first_query = walk.start_query;
        mbarrier_wait(base + Traits::kKeysFull, walk.run_of(head_idx) & 1);
        keys1.load(base, 64 * group);
        keys2.load(base + Traits::kK1Bytes, 64 * group);
        SKL_NO_UNROLL
        while (tiles_left > 0) {
            // The first tile, and the first behind one that leaked.
            ring.consumer_wait();
            wgmma_fence();
            multiply_logits(ring.stage);
            wgmma_wait<0>();
            pin_all(s1);
            pin_all(s2);
            bool leaks = find_gradients(ring.stage, first_query);
            round_gradients();
            int stage = ring.stage;
            ring.advance();
            first_query = walk.next_query(first_query);
            SKL_NO_UNROLL
            while (!leaks && --tiles_left > 0) {
                ring.consumer_wait();
                wgmma_fence();
                multiply_logits(ring.stage);
                multiply_dk(stage);
                pass_on_gradients();
                wgmma_wait<0>();
                pin_all(s1);
                pin_all(s2);
                pin_all(dk);
                release_queries(stage);
                leaks = find_gradients(ring.stage, first_query);
                round_gradients();
                stage = ring.stage;
                ring.advance();
                first_query = walk.next_query(first_query);
            }
            if (leaks) --tiles_left;
            if (leaks) {
                SKL_UNROLL
                for (int k = 0; kHasDk && k < kBlockQ / 16; ++k) {
                    add_scrubbed<Element, kHeadDim>(
                        dk, fragments[k], base + stage_offset(stage) + Traits::kQueriesOffset,
                        kBlockQ, 16 * k, 0);
                }
                pass_on_gradients();
            } else {
                wgmma_fence();
                multiply_dk(stage);
                pass_on_gradients();
                wgmma_wait<0>();
                pin_all(dk);
            }
            release_queries(stage);
        }
        __syncwarp();
        mbarrier_arrive_warp(base + Traits::kKeysEmpty, lane);
    }
    if constexpr (kHasDk) {
        const float scale = params.gradient_scale / factor;
        const float row_factor[2] = {scale, scale};
        store_gradient<Element>(params.dk,
                                walk.batch_idx * params.dk_rows.batch_stride +
                                    walk.key_head_idx * params.dk_rows.head_stride,
                                params.dk_rows.row_stride, first_key_of_warp, range.num_keys,
                                kSide == 1 ? params.head_dim1 : params.head_dim2, dk, row_factor);
    }
}

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kNumConsumers, int kNumStages,
          int kNumBuffers, int kRegisterSteps, bool kHasDk, bool kIsOrdered, Mask kMask,
          bool kHasSoftcap>
__global__ void __launch_bounds__(128 * (kNumConsumers + 2), 1)
    backward_fused_sm90(const __grid_constant__ InputMaps maps,
                        const __grid_constant__ BackwardParams params) {
    using Traits = FusedTraits<Element, kSide, kHeadDim1, kHeadDim2, kNumConsumers, kNumStages,
                               kNumBuffers, kRegisterSteps, kIsOrdered, kMask>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32 base = shared_address(smem);
    if (threadIdx.x == 0) {
        Ring<kNumStages>::init(base + Traits::kRingBarriers, Traits::kNumWarps);
        Ring<kNumBuffers>::init(base + Traits::kGradientBarriers, 4, Traits::kNumWarps);
        mbarrier_init(base + Traits::kKeysFull, 1);
        mbarrier_init(base + Traits::kKeysEmpty, Traits::kNumWarps * kArrivalsOfWarp);
        if constexpr (kIsOrdered) {
            Ring<1>::init(base + Traits::kMayAddBarriers, 4, 1);
            Ring<1>::init(base + Traits::kAddedBarriers, 1, 4);
        }
        mbarrier_fence_init();
    }
    __syncthreads();

    const int warpgroup = warp_id() / 4;
    if (warpgroup == 0) {
        give_registers<Traits::kProducerRegisters>();
        if (warp_id() == 0) produce<Traits>(maps, params, base);
        if constexpr (kIsOrdered) {
            if (warp_id() == 1) await_blocks<Traits>(params, base);
            if (warp_id() == 2) count_block<Traits>(params, base);
        }
    } else if (warpgroup == 1) {
        give_registers<Traits::kSumRegisters>();
        sum_dq<Traits>(params, smem, base);
    } else {
        take_registers<Traits::kConsumerRegisters>();
        consume<Traits, kHasDk, kHasSoftcap>(params, smem, base);
    }
}
