// backward_dq_sm90: what backward_dq_sm80 computes, by Hopper's warpgroup products and copy engine.
//
//   dq_t,i = scale_t dkl_i sum_j ds_t,ij k_t,j         t = kSide, ds as in gradient.cuh
//
// Grid: one block per (batch, head, block of 64 kNumConsumers queries), heavy blocks of a head
// first. Warpgroup 0 produces: one thread asks the copy engine for tiles. Each further warpgroup
// consumes: it owns 64 query rows.
//
//   1. Q1 and Q2 are fetched; the first steps of each become operands in registers.
//   2. Tiles of K1 and K2 run through a ring each.
//   3. S of the fixed side, then S of side t, of a tile; behind them in the matrix units dQ += dS
//   K_t of the tile before.
//   4. dS of the tile, zero where a row may not see the key, while that product runs. Rounded, it
//   is the left operand of the next one without leaving the registers.
//   5. dQ is scaled by scale_t dkl_i and written.
#include "backward_warpgroup.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "softcap.cuh"

// A warpgroup's queries and where it stands among the keys; see sum_gradients.
template <class Element, class Traits, class Range, bool kHasSoftcap>
struct QueryRows {
    static constexpr int kSide = Traits::kSide, kBlockK = Traits::kBlockCols;
    const BackwardParams& params;
    const Range& range;
    int first_row;  // of the warp
    int first_key;
    Interval all;
    WeightedStatistics statistics[2];
    float factor = is_same<Element, bf16> ? 1.f : kFp16Limit;  // |ds2| is about 1 at most

    // Of a row of this thread; those that do not exist take no part.
    SKL_DEVICE WeightedStatistics weighted_row(int line, int batch_idx, int head_idx) const {
        const int num_queries = range.num_queries, query = first_row + row_of_line(line);
        const int64 head =
            (static_cast<int64>(batch_idx) * params.num_heads + head_idx) * num_queries;
        const auto* rows =
            reinterpret_cast<const WeightedStatistics*>(params.row_statistics) + head;
        return query < num_queries ? rows[query] : weighted<kSide>(no_row(), 0.f);
    }
    SKL_DEVICE void load(int batch_idx, int head_idx) {
        SKL_UNROLL
        for (int line = 0; line < 2; ++line)
            statistics[line] = weighted_row(line, batch_idx, head_idx);
    }
    // The row's own weight waits for the end; a 1 is a constant to the compiler.
    SKL_DEVICE WeightedStatistics row(int line) const {
        WeightedStatistics row = statistics[line];
        row.weight = is_same<Element, bf16> ? 1.f : factor;
        return row;
    }
    SKL_DEVICE bool next(const PairSmem<Traits>&) {
        first_key += kBlockK;
        return false;
    }
    SKL_DEVICE void gradients(float (&fixed)[2][kBlockK / 4],
                              const float (&trained)[2][kBlockK / 4]) const {
        const BackwardParams& params = this->params;
        take_trained<kSide, kHasSoftcap, true>(
            fixed, trained, params, [&, this](int line, int e, const CappedLogit& logit) {
                const WeightedStatistics row = this->row(line);
                fixed[line][e] =
                    product_gradient<kSide, kHasSoftcap>(logit, fixed[line][e], row, params);
            });
    }
    SKL_DEVICE bool is_border() const {
        return first_key < all.begin || first_key + kBlockK > all.end;
    }
    SKL_DEVICE bool mask(float (&ds)[2][kBlockK / 4],
                         const float (&trained)[2][kBlockK / 4]) const {
        return mask_gradients(ds, trained, range, first_row, first_key);
    }
};

template <class Element, int kSide, int kHeadDim1, int kHeadDim2, int kNumConsumers, int kBlockK,
          int kFixedStages, int kTrainedStages, int kFixedSteps, int kTrainedSteps, Mask kMask,
          bool kHasSoftcap>
__global__ void __launch_bounds__(128 * (kNumConsumers + 1), 1)
    backward_dq_sm90(const __grid_constant__ InputMaps maps,
                     const __grid_constant__ BackwardParams params) {
    using Traits = PairTraits<kSide, kHeadDim1, kHeadDim2, kNumConsumers, kBlockK, kFixedStages,
                              kTrainedStages, kFixedSteps, kTrainedSteps, false>;
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    PairSmem<Traits> smem(shared_address(smem_bytes));

    const int head_of_batch = blockIdx.x / params.num_blocks;
    const int block_idx = params.num_blocks - 1 - blockIdx.x % params.num_blocks;
    const int batch_idx = head_of_batch / params.num_heads,
              head_idx = head_of_batch % params.num_heads;
    const int first_query = block_idx * Traits::kBlockRows;
    using Range = KeyRange<kMask>;
    const Range& range = range_of_entry<kMask>(params, batch_idx);
    const auto [tile_begin, tile_end] =
        tiles_of<kBlockK>(range, first_query, first_query + Traits::kBlockRows - 1);
    const int origin = origin_of<kBlockK>(range, first_query);
    const int warpgroup = warp_id() / 4;
    smem.init();
    __syncthreads();

    if (warpgroup == 0) {
        give_registers<Traits::kProducerRegisters>();
        if (threadIdx.x != 0) return;
        constexpr int kFixed = 3 - kSide;
        // 1. The queries.
        smem.load_rows(query_map<kFixed>(maps, params, head_idx, batch_idx),
                       query_map<kSide>(maps, params, head_idx, batch_idx), first_query);
        // 2. The keys.
        const HeadMap fixed_keys = key_map<kFixed>(maps, params, head_idx, batch_idx);
        const HeadMap trained_keys = key_map<kSide>(maps, params, head_idx, batch_idx);
        SKL_NO_UNROLL
        for (int tile = tile_begin; tile < tile_end; ++tile)
            smem.load_tiles(fixed_keys, trained_keys, tile * kBlockK + origin);
        return;
    }

    take_registers<Traits::kConsumerRegisters>();
    // 3. and 4. The tiles that the warpgroup's rows see, of those of the block.
    const int first_of_group = first_query + 64 * (warpgroup - 1);
    const Interval any = range.any_of(first_of_group, first_of_group + 63);
    const bool has_keys = first_of_group < range.num_queries && any.begin < any.end;
    const int group_begin = has_keys ? (any.begin - origin) / kBlockK : tile_begin;
    const int group_end = has_keys ? ceil_div(any.end - origin, kBlockK) : tile_begin;
    QueryRows<Element, Traits, Range, kHasSoftcap> rows{
        params, range, first_of_group + 16 * (warp_id() % 4), (group_begin - 1) * kBlockK + origin,
        range.all_of(first_of_group, first_of_group + 63)};
    rows.load(batch_idx, head_idx);
    float dq[2][Traits::kTrainedDim / 4];
    sum_gradients<Element>(dq, smem, rows, group_end - group_begin, group_begin - tile_begin,
                           tile_end - group_end);

    // 5. The rows.
    float row_factor[2];
    SKL_UNROLL
    for (int line = 0; line < 2; ++line) {
        const int query = rows.first_row + row_of_line(line);
        // A row without keys has a zero gradient, whatever dkl is.
        const bool counts = query < range.num_queries && range.begin(query) < range.end(query);
        const float weight = rows.weighted_row(line, batch_idx, head_idx).weight;
        row_factor[line] = counts ? weight * (params.gradient_scale / rows.factor) : 0.f;
    }
    store_gradient<Element>(
        params.dq, batch_idx * params.dq_rows.batch_stride + head_idx * params.dq_rows.head_stride,
        params.dq_rows.row_stride, rows.first_row, range.num_queries,
        kSide == 1 ? params.head_dim1 : params.head_dim2, dq, row_factor);
}
