// backward_dk_both_sm90: what two runs of backward_dk_sm90 compute, dK of both sides, in one pass.
//
//   dk_t,j = scale_t sum_i dkl_i ds_t,ij q_t,i         t = 1, 2, i over every query of every head
//   that shares the key head
//
// Both sides have the same groups of heads. Grid: one block per (batch, key head, block of 128
// keys). Warpgroup 0 produces: one thread asks the copy engine for tiles. Each further warpgroup
// consumes: it owns 64 keys.
//
//   1. K1 and K2 are fetched; the first steps of each become operands in registers.
//   2. Tiles of Q1 and Q2 run through a ring, head after head; with them the statistics of their
//   rows.
//   3. dK1 += dS1^T Q1 and dK2 += dS2^T Q2 of the tile before, behind them S1^T and S2^T of a tile.
//   4. dkl dS1^T and dkl dS2^T of the tile, zero where a query may not see the key. Rounded, they
//   are the left operands of the next products without leaving the registers.
//   5. dK_t is scaled by scale_t and written.
#include "backward_both.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "schedule.cuh"

// A warpgroup's keys and where it stands among the queries; see sum_both.
template <class Element, class Traits, class Range>
struct KeyRowsOfBoth {
    static constexpr int kBlockQ = Traits::kBlockCols;
    using Walk = QueryWalk<1, Traits::kBlockRows, kBlockQ>;
    const BothParams& params;
    const Range& range;
    const Walk& walk;
    int first_of_group;
    int first_query;
    float factor;         // of both sides, for the whole call
    float factor1 = 1.f;  // of side 1 beside it
    const unsigned char* smem_bytes;
    const WeightedStatistics* statistics = nullptr;

    SKL_DEVICE void next(const BothSmem<Traits>& smem) {
        statistics =
            reinterpret_cast<const WeightedStatistics*>(smem_bytes + smem.statistics_offset());
        first_query += kBlockQ;
        if (first_query >= walk.query_end) first_query = walk.query_begin;
    }
    // Five numbers of a query: those of side 1, and the weight of side 2. Both sides weigh P1 the
    // same, but for a unit.
    SKL_DEVICE void gradients(float (&s1)[2][kBlockQ / 4], float (&s2)[2][kBlockQ / 4]) const {
        const float scale1 = params.side1.scale1, scale2 = params.side1.scale2;
        SKL_UNROLL
        for (int e = 0; e < kBlockQ / 4; ++e) {
            WeightedStatistics row = statistics[col_of_element(e)];
            float weight2 = statistics[kBlockQ + col_of_element(e)].weight;
            if (is_same<Element, fp16>) {
                row.weight *= factor;
                weight2 *= factor;
            }
            SKL_UNROLL
            for (int line = 0; line < 2; ++line) {
                const PairOfGradients ds =
                    weighted_gradients(s1[line][e], s2[line][e], row, weight2, scale1, scale2);
                s1[line][e] = is_same<Element, fp16> ? ds.side1 * factor1 : ds.side1;
                s2[line][e] = ds.side2;
            }
        }
    }
    SKL_DEVICE bool is_border() const {
        const int last = first_query + kBlockQ - 1;
        const Interval all = range.all_of(first_query, last);
        return first_of_group < all.begin || first_of_group + 64 > all.end ||
               last >= range.num_queries;
    }
    // What is broken shows in its gradients.
    SKL_DEVICE void note(const float (&)[2][kBlockQ / 4], const float (&)[2][kBlockQ / 4]) const {}
    SKL_DEVICE bool mask(float (&ds1)[2][kBlockQ / 4], float (&ds2)[2][kBlockQ / 4]) const {
        const int first_key = first_of_group + 16 * (warp_id() % 4);
        const bool leaks = mask_transposed(ds1, range, first_key, first_query);
        return mask_transposed(ds2, range, first_key, first_query) || leaks;
    }
};

// 1. and 2. Of one thread.
template <class Traits, class Walk>
SKL_DEVICE void produce(const InputMaps& maps, const BothParams& params, BothSmem<Traits>& smem,
                        const Walk& walk) {
    const BackwardParams& common = params.side1;
    const int batch_idx = walk.batch_idx, query_end = walk.query_end;
    const int num_queries = common.range.num_queries;
    smem.load_rows(key_map<1>(maps, common, walk.head_begin, batch_idx),
                   key_map<2>(maps, common, walk.head_begin, batch_idx), walk.first_key);
    SKL_NO_UNROLL
    for (int head_idx = walk.head_begin; head_idx < walk.head_end; ++head_idx) {
        const HeadMap queries1 = query_map<1>(maps, common, head_idx, batch_idx);
        const HeadMap queries2 = query_map<2>(maps, common, head_idx, batch_idx);
        const int64 head =
            4 * (static_cast<int64>(batch_idx) * common.num_heads + head_idx) * num_queries;
        SKL_NO_UNROLL
        for (int first = walk.query_begin; first < query_end; first += Traits::kBlockCols) {
            const int64 row = head + 4 * static_cast<int64>(first);
            smem.load_tiles(queries1, queries2, first, params.side1.row_statistics + row,
                            params.side2.row_statistics + row,
                            min_of(Traits::kBlockCols, num_queries - first));
        }
    }
}

template <class Element, class Walk, int kElements>
SKL_DEVICE void store_keys(const BackwardParams& of, int head_dim, const Walk& walk, int first_row,
                           const float (&dk)[2][kElements], float factor) {
    const float factors[2] = {factor, factor};
    store_gradient<Element>(
        of.dk,
        walk.batch_idx * of.dk_rows.batch_stride + walk.key_head_idx * of.dk_rows.head_stride,
        of.dk_rows.row_stride, first_row, of.range.num_keys, head_dim, dk, factors);
}

template <class Element, int kHeadDim1, int kHeadDim2, int kBlockQ, int kNumStages, int kSteps1,
          int kSteps2, bool kLogitsFirst>
__global__ void __launch_bounds__(128 * 3, 1)
    backward_dk_both_sm90(const __grid_constant__ InputMaps maps,
                          const __grid_constant__ BothParams params) {
    using Traits =
        BothTraits<kHeadDim1, kHeadDim2, kBlockQ, kNumStages, kSteps1, kSteps2, kLogitsFirst, true>;
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    BothSmem<Traits> smem(shared_address(smem_bytes));

    // In shared memory: the registers belong to the accumulators.
    using Walk = QueryWalk<1, Traits::kBlockRows, kBlockQ>;
    static_assert(sizeof(Walk) <= Traits::kWalkBytes, "the walk fits its place");
    Walk& walk = *reinterpret_cast<Walk*>(smem_bytes + Traits::kWalkOffset);
    const BackwardParams& common = params.side1;
    using Range = KeyRange<kPlain>;
    const Range& range = range_of<Range>(common.range);
    if (threadIdx.x == 0) walk.start(common, range, blockIdx.x);
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
    KeyRowsOfBoth<Element, Traits, Range> rows{params,
                                               range,
                                               walk,
                                               walk.first_key + 64 * (warpgroup - 1),
                                               walk.query_begin - kBlockQ,
                                               call_factor<Element>(common.max_dkl),
                                               1.f,
                                               smem_bytes};
    float dk1[2][kHeadDim1 / 4], dk2[2][kHeadDim2 / 4];
    sum_both<Element>(dk1, dk2, smem, rows, (walk.head_end - walk.head_begin) * tiles_of_head);

    // 5. The keys' rows.
    const int first_row = rows.first_of_group + 16 * (warp_id() % 4);
    store_keys<Element>(params.side1, common.head_dim1, walk, first_row, dk1,
                        params.side1.gradient_scale / rows.factor / rows.factor1);
    store_keys<Element>(params.side2, common.head_dim2, walk, first_row, dk2,
                        params.side2.gradient_scale / rows.factor);
}
