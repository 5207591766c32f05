// The last steps of the forward kernels: the states of neighbouring lanes become one; a finished
// row is written, or the raw state of a split.
#pragma once
#include "base.cuh"
#include "kl_state.cuh"
#include "params.cuh"
#include "schedule.cuh"

// Merges groups of 2 kLargestDistance neighbouring lanes in a fixed tree; all of a group end with
// the same state.
template <int kLargestDistance>
SKL_DEVICE KlState merge_lanes(KlState state) {
    SKL_UNROLL
    for (int distance = kLargestDistance; distance >= 1; distance /= 2) {
        const KlState other = {
            __shfl_xor_sync(~0u, state.m1, distance), __shfl_xor_sync(~0u, state.l1, distance),
            __shfl_xor_sync(~0u, state.m2, distance), __shfl_xor_sync(~0u, state.l2, distance),
            __shfl_xor_sync(~0u, state.acc, distance)};
        state = merge(state, other);
    }
    return state;
}

template <class Range>
SKL_DEVICE void write_row(const ForwardParams& params, const Range& range, int batch_idx,
                          int head_idx, int query_idx, const KlState& state) {
    const RowsRef& rows = params.rows;
    const int64 at =
        batch_idx * rows.batch_stride + head_idx * rows.head_stride + query_idx * rows.row_stride;
    const RowResult result = finish(state);
    // Over one key both distributions are 1, and the rounding of 2^y has no place in their KL.
    const bool has_one_key = range.end(query_idx) - range.begin(query_idx) == 1;
    params.kl[at] = has_one_key ? 0.f * result.kl : result.kl;
    if (params.lse1 != nullptr) {
        params.lse1[at] = result.lse1.high;
        params.lse2[at] = result.lse2.high;
    }
    if (params.lse1_low != nullptr) {
        params.lse1_low[at] = result.lse1.low;
        params.lse2_low[at] = result.lse2.low;
    }
}

// Partial states are stored field by field, [5][rows][num_splits], so that the warp that merges a
// row reads whole lines.
SKL_DEVICE void write_partial(const ForwardParams& params, int64 at, const KlState& state) {
    const int64 field = params.num_rows * params.num_splits;
    params.partials[at] = state.m1;
    params.partials[at + field] = state.l1;
    params.partials[at + 2 * field] = state.m2;
    params.partials[at + 3 * field] = state.l2;
    params.partials[at + 4 * field] = state.acc;
}

// The end of a row of the forward: finished, or one of the partial states of its splits.
template <class Range>
SKL_DEVICE void write_state(const ForwardParams& params, const Range& range,
                            const ForwardBlock& block, int head_idx, int query_idx,
                            const KlState& state) {
    if (params.num_splits > 1) {
        const int64 row = (static_cast<int64>(block.batch_idx) * params.num_heads + head_idx) *
                              params.range.num_queries +
                          query_idx;
        write_partial(params, row * params.num_splits + block.split_idx, state);
    } else {
        write_row(params, range, block.batch_idx, head_idx, query_idx, state);
    }
}

SKL_DEVICE KlState read_partial(const ForwardParams& params, int64 at) {
    const int64 field = params.num_rows * params.num_splits;
    return {params.partials[at], params.partials[at + field], params.partials[at + 2 * field],
            params.partials[at + 3 * field], params.partials[at + 4 * field]};
}
