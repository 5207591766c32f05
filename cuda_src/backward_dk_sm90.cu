// backward_dk_sm90: what backward_dk_sm80 computes, by Hopper's warpgroup products and copy engine.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i         t = kSide, i over every query of every head
//   that shares the key head
//
// Grid: one block per (batch, key head of side t, block of 64 kNumConsumers keys). Warpgroup 0
// produces: one thread asks the copy engine for tiles. Each further warpgroup consumes: it owns 64
// keys.
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
#include "softcap.cuh"

// A warpgroup's keys and where it stands among the queries; see sum_gradients.
template <class Element, class Traits, class Range, bool kHasSoftcap>
struct KeyRows {
    static constexpr int kSide = Traits::kSide, kBlockQ = Traits::kBlockCols;
    using Walk = QueryWalk<kSide, Traits::kBlockRows, kBlockQ>;
    const BackwardParams& params;
    const Range& range;
    const Walk& walk;
    int first_of_group;
    Interval seeing_all;
    int head_idx, first_query, query_end;
    float factor;
    const unsigned char* smem_bytes;
    const WeightedStatistics* statistics = nullptr;

    SKL_DEVICE bool next(const PairSmem<Traits>& smem) {
        statistics =
            reinterpret_cast<const WeightedStatistics*>(smem_bytes + smem.statistics_offset());
        first_query += kBlockQ;
        if (first_query < query_end) return false;
        first_query = walk.query_begin;
        ++head_idx;
        return walk.exchanges_keys(params, {head_idx, first_query});
    }
    SKL_DEVICE void gradients(float (&fixed)[2][kBlockQ / 4],
                              const float (&trained)[2][kBlockQ / 4]) const {
        take_trained<kSide, kHasSoftcap, false>(
            fixed, trained, params, [&](int line, int e, const CappedLogit& logit) {
                WeightedStatistics row = statistics[col_of_element(e)];
                if (is_same<Element, fp16>) row.weight *= factor;
                fixed[line][e] =
                    product_gradient<kSide, kHasSoftcap>(logit, fixed[line][e], row, params);
            });
    }
    SKL_DEVICE bool is_border() const {
        const int last = first_query + kBlockQ - 1;
        if constexpr (Range::kIsRagged) {
            return first_query < seeing_all.begin || last >= seeing_all.end;
        } else {
            const Interval all = range.all_of(first_query, last);
            return first_of_group < all.begin || first_of_group + 64 > all.end ||
                   last >= range.num_queries;
        }
    }
    SKL_DEVICE bool mask(float (&ds)[2][kBlockQ / 4], const float (&)[2][kBlockQ / 4]) const {
        return mask_transposed(ds, range, first_of_group + 16 * (warp_id() % 4), first_query);
    }
};

// 1. and 2. Of one thread.
template <class Traits, class Walk>
SKL_DEVICE void produce(const InputMaps& maps, const BackwardParams& params, PairSmem<Traits>& smem,
                        const Walk& walk) {
    constexpr int kSide = Traits::kSide, kFixed = 3 - kSide;
    const int batch_idx = walk.batch_idx, query_end = walk.query_end;
    const int num_queries = params.range.num_queries;
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
        const float* statistics =
            params.row_statistics +
            4 * (static_cast<int64>(batch_idx) * params.num_heads + head_idx) * num_queries;
        SKL_NO_UNROLL
        for (int first = walk.query_begin; first < query_end; first += Traits::kBlockCols) {
            smem.load_tiles(fixed_queries, trained_queries, first,
                            statistics + 4 * static_cast<int64>(first),
                            min_of(Traits::kBlockCols, num_queries - first));
        }
    }
}

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kNumConsumers, int kBlockQ,
          int kFixedStages, int kTrainedStages, int kFixedSteps, int kTrainedSteps, Mask kMask,
          bool kHasSoftcap>
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
    using Range = KeyRange<kMask>;
    const Range& range = range_of_entry<kMask>(params, batch_of_keys<kSide>(params, blockIdx.x));
    if (threadIdx.x == 0) walk.start(params, range, blockIdx.x);
    const int warpgroup = warp_id() / 4;
    smem.init();
    __syncthreads();

    if (warpgroup == 0) {
        give_registers<Traits::kProducerRegisters>();
        if (threadIdx.x == 0) produce(maps, params, smem, walk);
        return;
    }

    take_registers<Traits::kConsumerRegisters>();
    // 3. and 4. The tiles.
    const int tiles_of_head = ceil_div(walk.query_end - walk.query_begin, kBlockQ);
    const int first_of_group = walk.first_key + 64 * (warpgroup - 1);
    KeyRows<Element, Traits, Range, kHasSoftcap> rows{params,
                                                      range,
                                                      walk,
                                                      first_of_group,
                                                      queries_of_all(range, first_of_group, 64),
                                                      walk.head_begin,
                                                      walk.query_begin - kBlockQ,
                                                      walk.query_end,
                                                      call_factor<Element>(params.max_dkl),
                                                      smem_bytes};
    float dk[2][Traits::kTrainedDim / 4];
    sum_gradients<Element>(dk, smem, rows, (walk.head_end - walk.head_begin) * tiles_of_head);

    // 5. The keys' rows.
    const float row_factor = params.gradient_scale / rows.factor;
    const float row_factors[2] = {row_factor, row_factor};
    store_gradient<Element>(params.dk,
                            walk.batch_idx * params.dk_rows.batch_stride +
                                walk.key_head_idx * params.dk_rows.head_stride,
                            params.dk_rows.row_stride, rows.first_of_group + 16 * (warp_id() % 4),
                            params.range.num_keys, kSide == 1 ? params.head_dim1 : params.head_dim2,
                            dk, row_factors);
}
