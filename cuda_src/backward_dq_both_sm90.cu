// backward_dq_both_sm90: what two runs of backward_dq_sm90 compute, dQ of both sides, in one pass.
//
//   dq_t,i = scale_t dkl_i sum_j ds_t,ij k_t,j         t = 1, 2, ds as in row_statistics.cuh
//
// Grid: one block per (batch, head, block of 128 queries), heavy blocks of a head
// first. Warpgroup 0 produces: one thread asks the copy engine for tiles. Each further warpgroup
// consumes: it owns 64 query rows.
//
//   1. Q1 and Q2 are fetched; the first steps of each become operands in registers.
//   2. Tiles of K1 and K2 run through a ring.
//   3. dQ1 += dS1 K1 and dQ2 += dS2 K2 of the tile before, behind them S1 and S2 of a tile.
//   4. dS1 and dS2 of the tile, zero where a row may not see the key. Rounded, they are the left
//   operands of the next products without leaving the registers.
//   5. dQ_t is scaled by scale_t dkl_i and written.
#include "backward_both.cuh"
#include "gradient.cuh"
#include "key_range.cuh"
#include "params.cuh"
#include "schedule.cuh"

// A warpgroup's queries and where it stands among the keys; see sum_both.
template <class Element, class Traits, class Range>
struct QueryRowsOfBoth {
    static constexpr int kBlockK = Traits::kBlockCols;
    const BothParams& params;
    const Range& range;
    int first_row;  // of the warp
    int first_key;
    Interval all;
    struct {
        float exponent1, exponent2, ratio, shift;
    } statistics[2];
    float factor1 = is_same<Element, bf16> ? 1.f : kFp16Limit;
    uint32 broken1 = 0, broken2 = 0;  // bit kBlockK / 4 line + e: a logit of a border tile

    // Of a row of this thread and a side; those that do not exist take no part.
    template <int kSide>
    SKL_DEVICE WeightedStatistics weighted_row(int line, int batch_idx, int head_idx) const {
        const BackwardParams& of = kSide == 1 ? params.side1 : params.side2;
        const int num_queries = range.num_queries, query = first_row + row_of_line(line);
        const int64 head = (static_cast<int64>(batch_idx) * of.num_heads + head_idx) * num_queries;
        const auto* rows = reinterpret_cast<const WeightedStatistics*>(of.row_statistics) + head;
        return query < num_queries ? rows[query] : weighted<kSide>(no_row(), 0.f);
    }
    SKL_DEVICE void load(int batch_idx, int head_idx) {
        SKL_UNROLL
        for (int line = 0; line < 2; ++line) {
            const WeightedStatistics of1 = weighted_row<1>(line, batch_idx, head_idx);
            const float ratio = weighted_row<2>(line, batch_idx, head_idx).last;
            statistics[line] = {of1.exponent1, of1.exponent2, ratio, of1.last};
        }
    }
    SKL_DEVICE void next(const BothSmem<Traits>&) { first_key += kBlockK; }
    // The rows' own weights wait for the end.
    SKL_DEVICE void gradients(float (&s1)[2][kBlockK / 4], float (&s2)[2][kBlockK / 4]) const {
        SKL_UNROLL
        for (int line = 0; line < 2; ++line) {
            const WeightedStatistics row1 = {statistics[line].exponent1, statistics[line].exponent2,
                                             is_same<Element, bf16> ? 1.f : factor1,
                                             statistics[line].shift};
            const WeightedStatistics row2 = {row1.exponent1, row1.exponent2,
                                             is_same<Element, bf16> ? 1.f : kFp16Limit,
                                             statistics[line].ratio};
            const float scale1 = params.side1.scale1, scale2 = params.side1.scale2;
            SKL_UNROLL
            for (int e = 0; e < kBlockK / 4; ++e) {
                const float x1 = s1[line][e], x2 = s2[line][e];
                s1[line][e] = weighted_gradient<1>(x1, x2, row1, scale1, scale2);
                s2[line][e] = weighted_gradient<2>(x1, x2, row2, scale1, scale2);
            }
        }
    }
    SKL_DEVICE bool is_border() const {
        return first_key < all.begin || first_key + kBlockK > all.end;
    }
    SKL_DEVICE void note(const float (&s1)[2][kBlockK / 4], const float (&s2)[2][kBlockK / 4]) {
        broken1 = broken_ones(s1);
        broken2 = broken_ones(s2);
    }
    SKL_DEVICE bool mask(float (&ds1)[2][kBlockK / 4], float (&ds2)[2][kBlockK / 4]) const {
        hide(ds1, broken1);
        hide(ds2, broken2);
        return (broken1 | broken2) != 0;
    }

    SKL_DEVICE static uint32 broken_ones(const float (&s)[2][kBlockK / 4]) {
        static_assert(kBlockK <= 64, "a bit each");
        uint32 broken = 0;
        SKL_UNROLL
        for (int line = 0; line < 2; ++line) {
            SKL_UNROLL
            for (int e = 0; e < kBlockK / 4; ++e) {
                broken |= !is_finite(s[line][e]) ? 1u << (kBlockK / 4 * line + e) : 0u;
            }
        }
        return broken;
    }
    // As mask_gradients, with what it would ask the logits.
    SKL_DEVICE void hide(float (&ds)[2][kBlockK / 4], uint32 broken) const {
        SKL_UNROLL
        for (int line = 0; line < 2; ++line) {
            const int query = first_row + row_of_line(line);
            SKL_UNROLL
            for (int e = 0; e < kBlockK / 4; ++e) {
                const int key = first_key + col_of_element(e);
                const bool is_visible = key >= range.begin(query) && key < range.end(query);
                const bool is_broken = broken >> (kBlockK / 4 * line + e) & 1;
                ds[line][e] = !is_visible ? 0.f
                              : is_broken ? __int_as_float(0x7fffffff)
                                          : ds[line][e];
            }
        }
    }
};

template <class Element, class Rows, int kElements>
SKL_DEVICE void store_queries(const BackwardParams& of, int head_dim, const Rows& rows,
                              int batch_idx, int head_idx, const float (&dq)[2][kElements],
                              const float (&factor)[2]) {
    store_gradient<Element>(
        of.dq, batch_idx * of.dq_rows.batch_stride + head_idx * of.dq_rows.head_stride,
        of.dq_rows.row_stride, rows.first_row, rows.range.num_queries, head_dim, dq, factor);
}

template <class Element, int kHeadDim1, int kHeadDim2, int kBlockK, int kNumStages, int kSteps1,
          int kSteps2, bool kLogitsFirst>
__global__ void __launch_bounds__(128 * 3, 1)
    backward_dq_both_sm90(const __grid_constant__ InputMaps maps,
                          const __grid_constant__ BothParams params) {
    using Traits = BothTraits<kHeadDim1, kHeadDim2, kBlockK, kNumStages, kSteps1, kSteps2,
                              kLogitsFirst, false>;
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    BothSmem<Traits> smem(shared_address(smem_bytes));

    const BackwardParams& common = params.side1;
    const int head_of_batch = blockIdx.x / common.num_blocks;
    const int block_idx = common.num_blocks - 1 - blockIdx.x % common.num_blocks;
    const int batch_idx = head_of_batch / common.num_heads,
              head_idx = head_of_batch % common.num_heads;
    const int first_query = block_idx * Traits::kBlockRows;
    using Range = KeyRange<kPlain>;
    const Range& range = range_of<Range>(common.range);
    const auto [tile_begin, tile_end] =
        tiles_of<kBlockK>(range, first_query, first_query + Traits::kBlockRows - 1);
    const int warpgroup = warp_id() / 4;
    smem.init();
    __syncthreads();

    if (warpgroup == 0) {
        give_registers<Traits::kProducerRegisters>();
        if (threadIdx.x != 0) return;
        // 1. The queries.
        smem.load_rows(query_map<1>(maps, common, head_idx, batch_idx),
                       query_map<2>(maps, common, head_idx, batch_idx), first_query);
        // 2. The keys.
        const HeadMap keys1 = key_map<1>(maps, common, head_idx, batch_idx);
        const HeadMap keys2 = key_map<2>(maps, common, head_idx, batch_idx);
        SKL_NO_UNROLL
        for (int tile = tile_begin; tile < tile_end; ++tile)
            smem.load_tiles(keys1, keys2, tile * kBlockK);
        return;
    }

    take_registers<Traits::kConsumerRegisters>();
    // 3. and 4. The tiles that the warpgroup's rows see, of those of the block.
    const int first_of_group = first_query + 64 * (warpgroup - 1);
    const Interval any = range.any_of(first_of_group, first_of_group + 63);
    const bool has_keys = first_of_group < range.num_queries && any.begin < any.end;
    const int group_begin = has_keys ? any.begin / kBlockK : tile_begin;
    const int group_end = has_keys ? ceil_div(any.end, kBlockK) : tile_begin;
    QueryRowsOfBoth<Element, Traits, Range> rows{
        params, range, first_of_group + 16 * (warp_id() % 4), (group_begin - 1) * kBlockK,
        range.all_of(first_of_group, first_of_group + 63)};
    rows.load(batch_idx, head_idx);
    float dq1[2][kHeadDim1 / 4], dq2[2][kHeadDim2 / 4];
    sum_both<Element>(dq1, dq2, smem, rows, group_end - group_begin, group_begin - tile_begin,
                      tile_end - group_end);

    // 5. The rows.
    float row_factor1[2], row_factor2[2];
    SKL_UNROLL
    for (int line = 0; line < 2; ++line) {
        const int query = rows.first_row + row_of_line(line);
        // A row without keys has a zero gradient, whatever dkl is.
        const bool counts = query < range.num_queries && range.begin(query) < range.end(query);
        const float weight1 = rows.template weighted_row<1>(line, batch_idx, head_idx).weight;
        const float weight2 = rows.template weighted_row<2>(line, batch_idx, head_idx).weight;
        const float unit2 = is_same<Element, bf16> ? 1.f : kFp16Limit;
        row_factor1[line] = counts ? weight1 * (params.side1.gradient_scale / rows.factor1) : 0.f;
        row_factor2[line] = counts ? weight2 * (params.side2.gradient_scale / unit2) : 0.f;
    }
    store_queries<Element>(params.side1, common.head_dim1, rows, batch_idx, head_idx, dq1,
                           row_factor1);
    store_queries<Element>(params.side2, common.head_dim2, rows, batch_idx, head_idx, dq2,
                           row_factor2);
}
