// backward_few_sm90: dQ and dK of one side for so few queries that the time is that of reading the
// keys. Hopper's warpgroup products and copy engine, queries stationary.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i     dq_t,i = scale_t dkl_i sum_j ds_t,ij k_t,j
//
// with t = kSide and ds as in gradient.cuh. The queries of all heads that share a key head are the
// rows of one tile of kRows, so that keys are read and dK is written once. Blocks add their parts
// of dQ to a float32 scratch in no fixed order, so the last bits of dQ differ from run to run;
// backward_finish scales and rounds it. dK has a fixed order. Without kHasDq or kHasDk only the
// other is made.
//
// Grid: a block a multiprocessor, each with a run of the tiles of 64 keys of all key heads, one
// head after the other. Warpgroup 0 produces: one lane asks the copy engine for tiles. Two further
// warpgroups consume: they take the tiles in turn.
//
//   1. Q1 and Q2 of the heads of a key head are fetched; each consumer collects the statistics of
//   their rows.
//   2. Tiles of K1 and K2 run through a ring of kNumStages buffers.
//   3. S1^T = K1 Q1^T and S2^T = K2 Q2^T.
//   4. The logits become dkl dS^T, zero where a query may not see the key, and go to shared memory.
//   5. dK = dS^T Q_t, whose left operand never leaves the registers, and dQ^T += K_t^T dS^T, whose
//   sums stay in registers as long as the key head stays the same.
//   6. The tile of keys is let go; dK is scaled by scale_t and written, by way of shared memory, so
//   that whole lines are.
//   7. Behind the last tile of a key head dQ is added to the scratch.
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

inline constexpr int kFewThreads = 128 * 3;  // a producer and two consumers

template <class Element_, int kSide_, int kHeadDim1_, int kHeadDim2_, int kRows_, int kNumStages_,
          bool kHasDq_, bool kHasDk_, bool kHasSoftcap_>
struct FewTraits {
    using Element = Element_;
    static constexpr int kSide = kSide_, kHeadDim1 = kHeadDim1_, kHeadDim2 = kHeadDim2_;
    static constexpr int kRows = kRows_, kNumStages = kNumStages_;
    static constexpr bool kHasDq = kHasDq_, kHasDk = kHasDk_, kHasSoftcap = kHasSoftcap_;
    static constexpr int kHeadDim = kSide == 1 ? kHeadDim1 : kHeadDim2;
    static constexpr int kPanels = PanelTile<kHeadDim>::kPanels;
    static constexpr int kBlockK = 64, kNumConsumers = 2, kNumWarps = 4 * kNumConsumers;
    static_assert(kNumStages % kNumConsumers == 0, "a stage always serves the same consumer");
    using Run = KeyRun<kBlockK>;

    // Shared memory: everything that the swizzle permutes lies at multiples of 1024.
    static constexpr int kQ1Bytes = PanelTile<kHeadDim1>::num_bytes(kRows);
    static constexpr int kQueryBytes = kQ1Bytes + PanelTile<kHeadDim2>::num_bytes(kRows);
    static constexpr int kQueriesOffset = kSide == 1 ? 0 : kQ1Bytes;  // of the side with gradients
    static constexpr int kRingOffset = kQueryBytes;
    static constexpr int kK1Bytes = PanelTile<kHeadDim1>::num_bytes(kBlockK);
    static constexpr int kStageBytes = kK1Bytes + PanelTile<kHeadDim2>::num_bytes(kBlockK);
    static constexpr int kKeysOffset = kSide == 1 ? 0 : kK1Bytes;  // in a stage, likewise
    static constexpr int kGradientOffset = kRingOffset + kNumStages * kStageBytes;
    static constexpr int kGradientBytes = kRows * kBlockK * 2;  // [rows][keys], of a consumer
    static constexpr int kLineOffset = kGradientOffset + kNumConsumers * kGradientBytes;
    static constexpr int kLineBytes = 16 * 64 * 2;  // a warp's keys, 64 columns of dK
    static constexpr int kStatisticsOffset = kLineOffset + kNumWarps * kLineBytes;
    static constexpr int kStatisticsBytes = kRows * static_cast<int>(sizeof(WeightedStatistics));
    static constexpr int kRingBarriers = kStatisticsOffset + kNumConsumers * kStatisticsBytes;
    static constexpr int kQueryBarriers = kRingBarriers + Ring<kNumStages>::kBytes;
    static constexpr int kLargestOffset = kQueryBarriers + Ring<1>::kBytes;  // one a consumer
    static constexpr int kSmemBytes = kLargestOffset + 4 * kNumConsumers;

    // Barrier 0 is that of __syncthreads; each consumer has one.
    static constexpr int kGroupBarrier = 1;

    // Registers move from the producer to the consumers; the sum may not pass the file's 64 K.
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

// 1. and 2. Of one warp.
template <class Traits>
SKL_DEVICE void produce(const InputMaps& maps, const BackwardParams& params, uint32 base) {
    using Tile1 = PanelTile<Traits::kHeadDim1>;
    using Tile2 = PanelTile<Traits::kHeadDim2>;
    constexpr int kRows = Traits::kRows, kBlockK = Traits::kBlockK;
    const typename Traits::Run run(params, blockIdx.x, gridDim.x);
    const int lane = lane_id(), heads = Traits::kSide == 1 ? params.group1 : params.group2;
    Ring<Traits::kNumStages> ring(base + Traits::kRingBarriers);
    Ring<1> queries(base + Traits::kQueryBarriers);
    SKL_NO_UNROLL
    for (int tile = run.begin; tile < run.end;) {
        const int key_head = run.key_head_of(tile), end = run.end_of_head(key_head);
        const auto [batch, key_head_idx, first_head] =
            heads_of_key<Traits::kSide>(params, key_head);
        queries.producer_acquire();
        if (lane == 0) {
            // The map of packed queries has its heads before its rows.
            const int rows_of_box = kRows / heads * heads;
            const bool is_packed = heads > 1;
            queries.producer_expect(Tile1::num_bytes(rows_of_box) + Tile2::num_bytes(rows_of_box));
            const int head1 = map_index(params.q1.head_stride, first_head),
                      head2 = map_index(params.q2.head_stride, first_head);
            Tile1::template load<kRows>(base, maps.q1, is_packed ? head1 : 0, is_packed ? 0 : head1,
                                        map_index(params.q1.batch_stride, batch), queries.full());
            Tile2::template load<kRows>(base + Traits::kQ1Bytes, maps.q2, is_packed ? head2 : 0,
                                        is_packed ? 0 : head2,
                                        map_index(params.q2.batch_stride, batch), queries.full());
        }
        __syncwarp();
        queries.advance();
        const int head1 = map_index(params.k1.head_stride, first_head / params.group1),
                  head2 = map_index(params.k2.head_stride, first_head / params.group2);
        const int batch1 = map_index(params.k1.batch_stride, batch),
                  batch2 = map_index(params.k2.batch_stride, batch);
        SKL_NO_UNROLL
        for (int first_key = run.first_key(tile, key_head); tile < end;
             ++tile, first_key += kBlockK) {
            ring.producer_acquire();
            if (lane == 0) {
                const uint32 sK1 = base + Traits::kRingOffset + ring.stage * Traits::kStageBytes;
                ring.producer_expect(Traits::kStageBytes);
                Tile1::template load<kBlockK>(sK1, maps.k1, first_key, head1, batch1, ring.full());
                Tile2::template load<kBlockK>(sK1 + Traits::kK1Bytes, maps.k2, first_key, head2,
                                              batch2, ring.full());
            }
            __syncwarp();
            ring.advance();
        }
    }
}

// A warpgroup that consumes, and what it holds as long as the key head stays the same.
template <class Traits>
struct Consumer {
    using Element = typename Traits::Element;
    static constexpr int kSide = Traits::kSide, kHeadDim = Traits::kHeadDim;
    static constexpr int kRows = Traits::kRows, kElements = kRows / 4, kSteps = kRows / 16;
    static constexpr int kBlockK = Traits::kBlockK, kPanels = Traits::kPanels;
    static constexpr bool kHasDq = Traits::kHasDq, kHasDk = Traits::kHasDk;

    const BackwardParams& params;
    unsigned char* smem;
    uint32 base;
    RowsOfKey rows;
    HeadsOfKey heads;
    int lane, warp, group;            // of the warp, of the warpgroup
    float dq[kPanels][2][kElements];  // dQ^T: 64 columns of K_t a panel, by rows
    float shrink_of_dq;               // its factor beyond that of the call

    SKL_DEVICE Consumer(const BackwardParams& params, unsigned char* smem, uint32 base)
        : params(params),
          smem(smem),
          base(base),
          rows(range_of<KeyRange<kPlain>>(params.range),
               kSide == 1 ? params.group1 : params.group2),
          lane(lane_id()),
          warp(warp_id() % 4),
          group(warp_id() / 4 - 1) {}

    SKL_DEVICE void sync() const { named_barrier_sync<128>(Traits::kGroupBarrier + group); }
    SKL_DEVICE bool any(bool condition) const {
        return named_barrier_any<128>(Traits::kGroupBarrier + group, condition);
    }
    SKL_DEVICE WeightedStatistics* statistics() const {
        return reinterpret_cast<WeightedStatistics*>(smem + Traits::kStatisticsOffset +
                                                     group * Traits::kStatisticsBytes);
    }
    SKL_DEVICE uint32 gradients() const {
        return base + Traits::kGradientOffset + group * Traits::kGradientBytes;
    }
    SKL_DEVICE int64 head_of_batch(int row) const {
        return static_cast<int64>(heads.batch_idx) * params.num_heads + heads.first_head +
               rows.head(row);
    }

    // 1. Rows that do not exist have a weight of zero.
    SKL_DEVICE void start(int key_head) {
        heads = heads_of_key<kSide>(params, key_head);
        SKL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) clear(dq[panel]);
        shrink_of_dq = 1.f;
        const int row = threadIdx.x % 128;
        sync();  // nobody reads the last statistics any more
        if (row < kRows) {
            WeightedStatistics found = weighted<kSide>(no_row(), 0.f);
            if (row < rows.num_rows()) {
                const int64 at = head_of_batch(row) * params.range.num_queries + rows.query(row);
                found = reinterpret_cast<const WeightedStatistics*>(params.row_statistics)[at];
                found.weight *= call_factor<Element>(params.max_dkl);
            }
            statistics()[row] = found;
        }
        sync();
    }

    // 3. The keys of a stage are the left operand, 64 rows.
    SKL_DEVICE void multiply_logits(float (&s1)[2][kElements], float (&s2)[2][kElements],
                                    uint32 sK1) const {
        PanelShared<Traits::kHeadDim1> keys1;
        PanelShared<Traits::kHeadDim2> keys2;
        keys1.load(sK1, kBlockK, 0);
        keys2.load(sK1 + Traits::kK1Bytes, kBlockK, 0);
        wgmma_fence();
        multiply_panels<Element, Traits::kHeadDim1, kRows>(s1, keys1, base);
        multiply_panels<Element, Traits::kHeadDim2, kRows>(s2, keys2, base + Traits::kQ1Bytes);
        wgmma_commit();
        wgmma_wait<0>();
        pin_all(s1);
        pin_all(s2);
    }

    // 4. Written over the logits of the other side.
    SKL_DEVICE void find_gradients(float (&ds)[2][kElements], const float (&s1)[2][kElements],
                                   const float (&s2)[2][kElements]) const {
        auto& trained = kSide == 1 ? s1 : s2;
        take_trained<kSide, Traits::kHasSoftcap, false>(
            ds, trained, params, [&](int line, int e, const CappedLogit& logit) {
                const int row = col_of_element(e);
                const WeightedStatistics of_row = statistics()[row];
                const float gradient = product_gradient<kSide, Traits::kHasSoftcap>(
                    logit, ds[line][e], of_row, params);
                // The zeros in place of a row that does not exist make NaN of an infinite key.
                ds[line][e] = row < rows.num_rows() ? gradient : 0.f;
            });
    }

    // Brings the gradients of a tile within float16, all by the same power of two, which it
    // returns; dQ follows.
    SKL_DEVICE float fit(float (&ds)[2][kElements]) {
        const float largest = largest_magnitude(ds);
        float shrink = 1.f;
        if (any(largest > kFp16Limit)) {
            auto* of_all = reinterpret_cast<uint32*>(smem + Traits::kLargestOffset) + group;
            atomicMax(of_all, __float_as_uint(largest));
            sync();
            shrink = shrink_to_limit(__uint_as_float(*of_all));
            sync();
            if (threadIdx.x % 128 == 0) *of_all = 0;
            multiply(ds, shrink);
        }
        if (shrink != shrink_of_dq) {
            SKL_UNROLL
            for (int panel = 0; panel < kPanels; ++panel) {
                multiply(dq[panel], shrink / shrink_of_dq);
            }
            shrink_of_dq = shrink;
        }
        return shrink;
    }

    // dS^T as the left operand of dK, and for all warps as [rows][keys].
    SKL_DEVICE void pass_on_gradients(uint32 (&fragments)[kSteps][4],
                                      const float (&ds)[2][kElements]) const {
        const uint32 sRow = panel_address(gradients(), kRows, (lane & 7) + (lane >> 4) * 8, 0,
                                          2 * warp + ((lane >> 3) & 1));
        if constexpr (kHasDq) sync();  // nobody reads the last gradients any more
        SKL_UNROLL
        for (int k = 0; k < kSteps; ++k) {
            pack_a<Element>(fragments[k], ds[0], ds[1], k);
            if constexpr (kHasDq) stmatrix_x4_trans(sRow + k * (16 * 128), fragments[k]);
        }
        if constexpr (kHasDq) {
            fence_async_shared();
            sync();
        }
    }

    // 5. dK of 64 keys, and what they add to dQ^T, 64 columns at a time.
    SKL_DEVICE void multiply_gradients(float (&dk)[2][kHeadDim / 4],
                                       const uint32 (&fragments)[kSteps][4], uint32 sK) {
        using ProductDk = Wgmma<Element, kHeadDim, 0, 1>;
        using ProductDq = Wgmma<Element, kRows, 1, 0>;
        wgmma_fence();
        if constexpr (kHasDk) {
            const uint64 b = panel_descriptor(base + Traits::kQueriesOffset, kRows * 128);
            ProductDk::start(dk, fragments[0], b);
            SKL_UNROLL
            for (int k = 1; k < kSteps; ++k) ProductDk::add(dk, fragments[k], b + k * 128);
        }
        const uint64 b = panel_descriptor(gradients());
        SKL_UNROLL
        for (int panel = 0; kHasDq && panel < kPanels; ++panel) {
            const uint64 a = panel_descriptor(sK + panel * (kBlockK * 128));
            SKL_UNROLL
            for (int k = 0; k < kBlockK / 16; ++k) {
                ProductDq::add(dq[panel], a + k * 128, b + panel_step(k, kRows));
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        if constexpr (kHasDk) pin_all(dk);
        SKL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) pin_all(dq[panel]);
    }

    // Whether the thread's key of a tile holds a NaN or Inf.
    SKL_DEVICE bool finds_broken_key(int keys_offset) const {
        const int row = threadIdx.x % 128;
        if (row >= kBlockK) return false;
        bool is_broken = false;
        SKL_NO_UNROLL
        for (int chunk = 0; chunk < kPanels * 8; ++chunk) {
            const uint4 v = *reinterpret_cast<const uint4*>(
                smem + panel_address(keys_offset, kBlockK, row, chunk / 8, chunk % 8));
            is_broken |= finite_or_zero<Element>(v.x) != v.x ||
                         finite_or_zero<Element>(v.y) != v.y ||
                         finite_or_zero<Element>(v.z) != v.z || finite_or_zero<Element>(v.w) != v.w;
        }
        return is_broken;
    }

    // Writes NaN into dS for every row that sees the thread's broken key: the product for dQ is
    // about to read it as zero, for the sake of the rows that do not see it.
    SKL_DEVICE void mark_broken_key(int key_of_tile, int key) const {
        if (key >= params.range.num_keys) return;
        const Interval visible = rows.queries_of(key, key);
        SKL_NO_UNROLL
        for (int row = visible.begin; row < visible.end; ++row) {
            *reinterpret_cast<uint16*>(
                smem + panel_address(gradients() - base, kRows, row, 0, key_of_tile / 8) +
                key_of_tile % 8 * 2) = 0x7fff;
        }
    }

    // The same products warp by warp, which read broken elements of K_t and Q_t as zero.
    SKL_DEVICE void multiply_scrubbed(float (&dk)[2][kHeadDim / 4],
                                      const uint32 (&fragments)[kSteps][4], uint32 sK) {
        clear(dk);
        SKL_UNROLL
        for (int k = 0; kHasDk && k < kSteps; ++k) {
            add_scrubbed<Element, kHeadDim>(dk, fragments[k], base + Traits::kQueriesOffset, kRows,
                                            16 * k, 0);
        }
        const int row = (lane & 7) + (lane >> 4) * 8, chunk = (lane >> 3) & 1;
        SKL_UNROLL
        for (int panel = 0; kHasDq && panel < kPanels; ++panel) {
            SKL_NO_UNROLL
            for (int k = 0; k < kBlockK / 16; ++k) {
                uint32 a[1][4];
                ldmatrix_x4_trans(
                    a[0], panel_address(sK, kBlockK, 16 * k + row, panel, 2 * warp + chunk));
                SKL_UNROLL
                for (int j = 0; j < 4; ++j) a[0][j] = finite_or_zero<Element>(a[0][j]);
                SKL_UNROLL
                for (int pair = 0; pair < kSteps; ++pair) {
                    uint32 b[4];
                    ldmatrix_x4(
                        b, panel_address(gradients(), kRows, 16 * pair + row, 0, 2 * k + chunk));
                    multiply_step<Element, 1>(dq[panel], a, b, pair);
                }
            }
        }
    }

    // 6. The warp's 16 keys, 64 columns at a time.
    SKL_DEVICE void store_keys(int first_key, const float (&dk)[2][kHeadDim / 4],
                               float scale) const {
        const uint32 sLines = base + Traits::kLineOffset + (4 * group + warp) * Traits::kLineBytes;
        int lane = this->lane;
        pin(lane);  // or the addresses made of it stay in registers all the time
        const int row = lane / 8, chunk = lane % 8;
        const int head_dim = kSide == 1 ? params.head_dim1 : params.head_dim2;
        const int num_rows = params.range.num_keys - first_key;
        uint16* to = static_cast<uint16*>(params.dk) +
                     heads.batch_idx * params.dk_rows.batch_stride +
                     heads.key_head_idx * params.dk_rows.head_stride +
                     (first_key + row) * params.dk_rows.row_stride + chunk * 8;
        SKL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
            SKL_UNROLL
            for (int i = 0; i < min_of(4, kHeadDim / 16 - 4 * panel); ++i) {
                const int e = 16 * panel + 4 * i;
                const uint32 packed[4] = {
                    pack<Element>(dk[0][e] * scale, dk[0][e + 1] * scale),
                    pack<Element>(dk[1][e] * scale, dk[1][e + 1] * scale),
                    pack<Element>(dk[0][e + 2] * scale, dk[0][e + 3] * scale),
                    pack<Element>(dk[1][e + 2] * scale, dk[1][e + 3] * scale)};
                stmatrix_x4(panel_address(sLines, 16, lane & 15, 0, 2 * i + (lane >> 4)), packed);
            }
            __syncwarp();
            SKL_UNROLL
            for (int j = 0; j < 16; j += 4) {
                const uint4 v = *reinterpret_cast<const uint4*>(
                    smem + panel_address(sLines - base, 16, j + row, 0, chunk));
                if (j + row < num_rows && 64 * panel + 8 * chunk < head_dim) {
                    *reinterpret_cast<uint4*>(to + j * params.dk_rows.row_stride + 64 * panel) = v;
                }
            }
            __syncwarp();
        }
    }

    // 7. The scratch holds tiles of 16 rows by 8 columns as fragment.cuh deals accumulators, four
    // floats a lane: two columns of a row and of the one eight below. The other column of a row is
    // with the neighbour in dQ^T, and so each of the two gives one away.
    SKL_DEVICE void add_dq(int key_head, float unscale) const {
        const int row_tiles = ceil_div(rows.num_rows(), 16);
        const bool is_odd = (lane >> 2 & 1) != 0;
        SKL_UNROLL
        for (int k = 0; k < kSteps; ++k) {
            if (k >= row_tiles) break;
            float* scratch = params.dq_scratch +
                             (static_cast<int64>(key_head) * row_tiles + k) * (16 * kHeadDim);
            SKL_UNROLL
            for (int panel = 0; panel < kPanels; ++panel) {
                SKL_UNROLL
                for (int line = 0; line < 2; ++line) {
                    const int col = 64 * panel + 16 * warp + row_of_line(line);
                    float of_row[4];
                    SKL_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const float first = dq[panel][line][4 * k + 2 * half];
                        const float second = dq[panel][line][4 * k + 2 * half + 1];
                        const float other = __shfl_xor_sync(~0u, is_odd ? first : second, 4);
                        of_row[2 * half] = unscale * (is_odd ? other : first);
                        of_row[2 * half + 1] = unscale * (is_odd ? second : other);
                    }
                    const int row = 2 * (lane & 3) + is_odd;
                    if (col < kHeadDim) {
                        reduce_add_global(scratch + col / 8 * 128 + row * 16 + col % 8 / 2 * 4,
                                          of_row[0], of_row[1], of_row[2], of_row[3]);
                    }
                }
            }
        }
    }
};

// Steps 3 to 7. Of a warpgroup.
template <class Traits>
SKL_DEVICE void consume(const BackwardParams& params, unsigned char* smem, uint32 base) {
    using Element = typename Traits::Element;
    constexpr int kBlockK = Traits::kBlockK, kElements = Traits::kRows / 4;
    const typename Traits::Run run(params, blockIdx.x, gridDim.x);
    Consumer<Traits> consumer(params, smem, base);
    const int lane = consumer.lane;
    const Interval all = consumer.rows.range.all_of(0, params.range.num_queries - 1);
    const float factor = call_factor<Element>(params.max_dkl);
    Ring<Traits::kNumStages> ring(base + Traits::kRingBarriers);
    Ring<1> queries(base + Traits::kQueryBarriers);
    // Every other tile, from the first or from the second on.
    int tile = run.begin + consumer.group;
    if (consumer.group == 1) ring.advance();
    SKL_NO_UNROLL
    for (int key_head = run.key_head_of(run.begin); key_head <= run.key_head_of(run.end - 1);
         ++key_head) {
        consumer.start(key_head);
        queries.consumer_wait();
        const int end = run.end_of_head(key_head);
        SKL_NO_UNROLL
        for (; tile < end; tile += Traits::kNumConsumers) {
            const int first_key = run.first_key(tile, key_head);
            const int first_key_of_warp = first_key + 16 * consumer.warp;
            const int stage_offset = Traits::kRingOffset + ring.stage * Traits::kStageBytes;
            const uint32 sK = base + stage_offset + Traits::kKeysOffset;
            ring.consumer_wait();
            float s1[2][kElements], s2[2][kElements];
            auto& ds = Traits::kSide == 1 ? s2 : s1;
            consumer.multiply_logits(s1, s2, base + stage_offset);
            consumer.find_gradients(ds, s1, s2);
            bool is_broken = false, scrubs = false;
            if (first_key < all.begin || first_key + kBlockK > all.end) {
                int first_key_here = first_key_of_warp;
                pin(first_key_here);  // or what the masks make of it stays in registers
                const bool leaks = mask_transposed(ds, consumer.rows, first_key_here, 0);
                is_broken = consumer.finds_broken_key(stage_offset + Traits::kKeysOffset);
                scrubs = consumer.any(leaks || is_broken);
            }
            float shrink = 1.f;
            if constexpr (kNeedsRunningFactor<Element, Traits::kSide>) shrink = consumer.fit(ds);
            uint32 fragments[Traits::kRows / 16][4];
            consumer.pass_on_gradients(fragments, ds);
            float dk[2][Traits::kHeadDim / 4];
            if (scrubs) {
                const int key = threadIdx.x % 128;
                if (is_broken) consumer.mark_broken_key(key, first_key + key);
                consumer.sync();
                consumer.multiply_scrubbed(dk, fragments, sK);
            } else {
                consumer.multiply_gradients(dk, fragments, sK);
            }
            __syncwarp();
            ring.consumer_release(lane);
            SKL_UNROLL
            for (int i = 0; i < Traits::kNumConsumers; ++i) ring.advance();
            if constexpr (Traits::kHasDk) {
                const float scale = params.gradient_scale / (factor * shrink);
                consumer.store_keys(first_key_of_warp, dk, scale);
            }
        }
        __syncwarp();
        queries.consumer_release(lane);
        queries.advance();
        if constexpr (Traits::kHasDq)
            consumer.add_dq(key_head, 1.f / (factor * consumer.shrink_of_dq));
    }
}

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kRows, int kNumStages,
          bool kHasDq, bool kHasDk, bool kHasSoftcap>
__global__ void __launch_bounds__(kFewThreads, 1)
    backward_few_sm90(const __grid_constant__ InputMaps maps,
                      const __grid_constant__ BackwardParams params) {
    using Traits = FewTraits<Element, kSide, kHeadDim1, kHeadDim2, kRows, kNumStages, kHasDq,
                             kHasDk, kHasSoftcap>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32 base = shared_address(smem);
    if (threadIdx.x == 0) {
        Ring<kNumStages>::init(base + Traits::kRingBarriers, 4);
        Ring<1>::init(base + Traits::kQueryBarriers, Traits::kNumWarps);
        mbarrier_fence_init();
    }
    // Rows that no box of packed queries brings are zero.
    const uint32 zeros[4] = {0, 0, 0, 0};
    for (int at = threadIdx.x * 16; at < Traits::kQueryBytes; at += kFewThreads * 16) {
        store_shared_128(base + at, zeros);
    }
    if (threadIdx.x < Traits::kNumConsumers) {
        reinterpret_cast<uint32*>(smem + Traits::kLargestOffset)[threadIdx.x] = 0;
    }
    fence_async_shared();
    __syncthreads();

    if (warp_id() < 4) {
        give_registers<Traits::kProducerRegisters>();
        if (warp_id() == 0) produce<Traits>(maps, params, base);
    } else {
        take_registers<Traits::kConsumerRegisters>();
        consume<Traits>(params, smem, base);
    }
}
