// backward_dk_sm90: what backward_dk_sm80 computes, by Hopper's warpgroup products and copy engine.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i         t = kSide, i over every query of every head
//   that shares the key head
//
// Grid: one block per (batch, key head of side t, block of 64 kNumConsumers keys). Warpgroup 0
// produces: one thread asks the copy engine for tiles, and the second warp copies the statistics of
// their rows. Each further warpgroup consumes: it owns 64 keys.
//
//   1. K1 and K2 are fetched; the first steps of each become operands in registers. A group of
//   heads may share K_t and not the other: that one is exchanged on the way.
//   2. Tiles of Q1 and Q2 run through a ring each, head after head; with those of side t the
//   statistics of their rows.
//   3. S^T of the fixed side, then S^T of side t, of a tile; behind them in the matrix units
//   dK += dS^T Q_t of the tile before.
//   4. dkl dS^T of the tile, zero where a query may not see the key, while that product runs.
//   Rounded, it is the left operand of the next one without leaving the registers.
//   5. dK is scaled by scale_t and written.
#include "backward_warpgroup.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "schedule.cuh"

// The statistics of a tile of queries as the consumers read them: a thread has pairs of
// neighbouring columns, and what it needs of a pair for one side's exponentials lies together.
template <int kBlockQ>
struct PairedStatistics {
    static constexpr bool kWide = true;
    static constexpr int kBytes = kBlockQ * static_cast<int>(sizeof(WeightedStatistics));
    uint32 address;

    SKL_DEVICE uint32 at(int half, int col, int field) const {
        return kWide ? address + half * (kBlockQ * 8) + col / 2 * 16 + field * 8 + col % 2 * 4
                     : address + (half * 2 + field) * (kBlockQ * 4) + col * 4;
    }
    SKL_DEVICE void store(int col, const WeightedStatistics& row) const {
        store_shared_32(at(0, col, 0), __float_as_uint(row.exponent1));
        store_shared_32(at(0, col, 1), __float_as_uint(row.weight1));
        store_shared_32(at(1, col, 0), __float_as_uint(row.exponent2));
        store_shared_32(at(1, col, 1), __float_as_uint(row.last));
    }
    // exponent1 and weight1 (half 0) or exponent2 and last (half 1) of two columns.
    SKL_DEVICE void load(float (&exponent)[2], float (&other)[2], int half, int col) const {
        if constexpr (kWide) {
            float v[4];
            load_shared_128(v, at(half, col, 0));
            exponent[0] = v[0], exponent[1] = v[1], other[0] = v[2], other[1] = v[3];
        } else {
            load_shared_64(exponent, at(half, col, 0));
            load_shared_64(other, at(half, col, 1));
        }
    }
};

// A warpgroup's keys and where it stands among the queries; see sum_gradients.
template <class Element, class Traits>
struct KeyRows {
    static constexpr int kSide = Traits::kSide, kBlockQ = Traits::kBlockCols;
    using Walk = QueryWalk<kSide, Traits::kBlockRows, kBlockQ>;
    const BackwardParams& params;
    const Walk& walk;
    int first_of_group;
    int head_idx, first_query, query_end;
    PairedStatistics<kBlockQ> statistics{0};
    float factor = 1.f;  // besides that of the call, which is in the statistics

    SKL_DEVICE bool next(const PairSmem<Traits>& smem) {
        statistics.address = smem.statistics();
        first_query += kBlockQ;
        if (first_query < query_end) return false;
        first_query = walk.query_begin;
        ++head_idx;
        return walk.exchanges_keys(params, {head_idx, first_query});
    }
    SKL_DEVICE void reads_fixed(float (&fixed)[2][kBlockQ / 4]) const {
        SKL_UNROLL
        for (int e = 0; e < kBlockQ / 4; e += 2) {
            float exponent1[2], weight1[2];
            statistics.load(exponent1, weight1, 0, col_of_element(e));
            SKL_UNROLL
            for (int i = 0; i < 2; ++i) {
                const WeightedStatistics row = {exponent1[i], 0.f, weight1[i], 0.f};
                SKL_UNROLL
                for (int line = 0; line < 2; ++line) {
                    float& x = fixed[line][e + i];
                    x = weighted_probability1(x, row, params.scale1);
                }
            }
        }
    }
    SKL_DEVICE void gradients(float (&fixed)[2][kBlockQ / 4],
                              const float (&trained)[2][kBlockQ / 4]) const {
        SKL_UNROLL
        for (int e = 0; e < kBlockQ / 4; e += 2) {
            float exponent1[2], weight1[2], exponent2[2], last[2];
            if (kSide == 1) statistics.load(exponent1, weight1, 0, col_of_element(e));
            statistics.load(exponent2, last, 1, col_of_element(e));
            SKL_UNROLL
            for (int i = 0; i < 2; ++i) {
                SKL_UNROLL
                for (int line = 0; line < 2; ++line) {
                    const float x = trained[line][e + i];
                    float& ds = fixed[line][e + i];
                    if constexpr (kSide == 2) {
                        const WeightedStatistics row = {0.f, exponent2[i], 0.f, last[i]};
                        ds = weighted_gradient2(ds, x, row, params.scale2);
                    } else {
                        WeightedStatistics row = {exponent1[i], exponent2[i], weight1[i], last[i]};
                        if (is_same<Element, fp16>) row = times<1>(row, factor);
                        ds = weighted_gradient<1>(x, ds, row, params.scale1, params.scale2);
                    }
                }
            }
        }
    }
    SKL_DEVICE bool is_border() const {
        const int last = first_query + kBlockQ - 1;
        const Interval all = params.range.all_of(first_query, last);
        return first_of_group < all.begin || first_of_group + 64 > all.end ||
               last >= params.range.num_queries;
    }
    SKL_DEVICE bool mask(float (&ds)[2][kBlockQ / 4],
                         const float (&trained)[2][kBlockQ / 4]) const {
        return mask_transposed(ds, trained, params.range, first_of_group + 16 * (warp_id() % 4),
                               first_query);
    }
};

// 1. and 2. Of one thread.
template <class Traits, class Walk>
SKL_DEVICE void produce(const InputMaps& maps, const BackwardParams& params, PairSmem<Traits>& smem,
                        const Walk& walk) {
    constexpr int kSide = Traits::kSide, kFixed = 3 - kSide;
    const int batch_idx = walk.batch_idx, query_end = walk.query_end;
    smem.load_rows(key_map<kFixed>(maps, params, walk.head_begin, batch_idx),
                   key_map<kSide>(maps, params, walk.head_begin, batch_idx), walk.first_key);
    uint32 phase = 0;
    SKL_NO_UNROLL
    for (int head_idx = walk.head_begin; head_idx < walk.head_end; ++head_idx) {
        if (walk.exchanges_keys(params, {head_idx, walk.query_begin})) {
            mbarrier_wait(smem.own_empty(), phase);
            phase ^= 1;
            smem.exchange_rows(key_map<kFixed>(maps, params, head_idx, batch_idx), walk.first_key);
        }
        const HeadMap fixed_queries = query_map<kFixed>(maps, params, head_idx, batch_idx);
        const HeadMap trained_queries = query_map<kSide>(maps, params, head_idx, batch_idx);
        SKL_NO_UNROLL
        for (int first = walk.query_begin; first < query_end; first += Traits::kBlockCols)
            smem.load_tiles(fixed_queries, trained_queries, first);
    }
}

// 2. Of one warp.
template <class Element, class Traits, class Walk>
SKL_DEVICE void produce_statistics(const BackwardParams& params, PairSmem<Traits>& smem,
                                   const Walk& walk) {
    constexpr int kSide = Traits::kSide, kBlockQ = Traits::kBlockCols;
    constexpr int kRows = ceil_div(kBlockQ, 32);
    const int num_queries = params.range.num_queries, query_end = walk.query_end;
    const float factor = call_factor<Element>(params.max_dkl);
    SKL_NO_UNROLL
    for (int head_idx = walk.head_begin; head_idx < walk.head_end; ++head_idx) {
        const auto* rows =
            reinterpret_cast<const WeightedStatistics*>(params.row_statistics) +
            (static_cast<int64>(walk.batch_idx) * params.num_heads + head_idx) * num_queries;
        SKL_NO_UNROLL
        for (int first = walk.query_begin; first < query_end; first += kBlockQ) {
            WeightedStatistics row[kRows];
            SKL_UNROLL
            for (int i = 0; i < kRows; ++i) {
                const int query = first + lane_id() + 32 * i;
                row[i] = query < num_queries ? rows[query] : weighted<kSide>(no_row(), 0.f);
            }
            smem.trained.producer_acquire();
            const PairedStatistics<kBlockQ> statistics{smem.statistics()};
            SKL_UNROLL
            for (int i = 0; i < kRows; ++i) {
                const int col = lane_id() + 32 * i;
                if (kBlockQ % 32 == 0 || col < kBlockQ)
                    statistics.store(col, times<kSide>(row[i], factor));
            }
            __syncwarp();
            smem.trained.producer_commit(lane_id());
            smem.trained.advance();
        }
    }
}

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kNumConsumers, int kBlockQ,
          int kFixedStages, int kTrainedStages, int kFixedSteps, int kTrainedSteps>
__global__ void __launch_bounds__(128 * (kNumConsumers + 1), 1)
    backward_dk_sm90(const __grid_constant__ InputMaps maps,
                     const __grid_constant__ BackwardParams params) {
    using Traits = PairTraits<kSide, kHeadDim1, kHeadDim2, kNumConsumers, kBlockQ, kFixedStages,
                              kTrainedStages, kFixedSteps, kTrainedSteps, true>;
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    PairSmem<Traits> smem(shared_address(smem_bytes));

    // In shared memory: the registers belong to the accumulators.
    using Walk = QueryWalk<kSide, Traits::kBlockRows, kBlockQ>;
    static_assert(sizeof(Walk) <= Traits::kWalkBytes, "the walk fits its place");
    Walk& walk = *reinterpret_cast<Walk*>(smem_bytes + Traits::kWalkOffset);
    if (threadIdx.x == 0) walk.start(params, blockIdx.x);
    const int warpgroup = warp_id() / 4;
    smem.init(2);
    __syncthreads();

    if (warpgroup == 0) {
        give_registers<Traits::kProducerRegisters>();
        if (threadIdx.x == 0) produce(maps, params, smem, walk);
        if (warp_id() == 1) produce_statistics<Element>(params, smem, walk);
        return;
    }

    take_registers<Traits::kConsumerRegisters>();
    // 3. and 4. The tiles.
    const int tiles_of_head = ceil_div(walk.query_end - walk.query_begin, kBlockQ);
    KeyRows<Element, Traits> rows{params,
                                  walk,
                                  walk.first_key + 64 * (warpgroup - 1),
                                  walk.head_begin,
                                  walk.query_begin - kBlockQ,
                                  walk.query_end};
    float dk[2][Traits::kTrainedDim / 4];
    sum_gradients<Element>(dk, smem, rows, (walk.head_end - walk.head_begin) * tiles_of_head);

    // 5. The keys' rows.
    const float row_factor =
        params.gradient_scale / (rows.factor * call_factor<Element>(params.max_dkl));
    const float row_factors[2] = {row_factor, row_factor};
    store_gradient<Element>(params.dk,
                            walk.batch_idx * params.dk_rows.batch_stride +
                                walk.key_head_idx * params.dk_rows.head_stride,
                            params.dk_rows.row_stride, rows.first_of_group + 16 * (warp_id() % 4),
                            params.range.num_keys, kSide == 1 ? params.head_dim1 : params.head_dim2,
                            dk, row_factors);
}
