// The last steps of the forward kernels: the states of neighbouring lanes become one; a finished
// row is written, or the raw state of a split.
#pragma once
#include "base.cuh"
#include "kl_state.cuh"
#include "params.cuh"
#include "schedule.cuh"

// Merges groups of 2 kLargestDistance neighbouring lanes in a fixed tree; all of a group end with
// the same state.
template <int kLargestDistance, class State>
SKL_DEVICE State merge_lanes(State state) {
    SKL_UNROLL
    for (int distance = kLargestDistance; distance >= 1; distance /= 2) {
        State other;
        other.m1 = __shfl_xor_sync(~0u, state.m1, distance);
        other.l1 = __shfl_xor_sync(~0u, state.l1, distance);
        other.m2 = __shfl_xor_sync(~0u, state.m2, distance);
        other.l2 = __shfl_xor_sync(~0u, state.l2, distance);
        other.acc = __shfl_xor_sync(~0u, state.acc, distance);
        if constexpr (kHasMoment<State>) {
            other.moment1 = __shfl_xor_sync(~0u, state.moment1, distance);
        }
        state = merge(state, other);
    }
    return state;
}

template <class Range, class State>
SKL_DEVICE void write_row(const ForwardParams& params, const Range& range, int batch_idx,
                          int head_idx, int query_idx, const State& state) {
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
    if constexpr (kHasMoment<State>) {
        const float entropy = has_one_key ? 0.f * result.kl : entropy_of(state);
        params.entropy[at] = entropy;
        params.cross_entropy[at] = entropy + params.kl[at];
    }
}

// Partial states are stored field by field, [5 or 6][rows][num_splits], so that the warp that
// merges a row reads whole lines.
template <class State>
SKL_DEVICE void write_partial(const ForwardParams& params, int64 at, const State& state) {
    const int64 field = params.num_rows * params.num_splits;
    params.partials[at] = state.m1;
    params.partials[at + field] = state.l1;
    params.partials[at + 2 * field] = state.m2;
    params.partials[at + 3 * field] = state.l2;
    params.partials[at + 4 * field] = state.acc;
    if constexpr (kHasMoment<State>) params.partials[at + 5 * field] = state.moment1;
}

// The end of a row of the forward: finished, or one of the partial states of its splits.
template <class Range, class State>
SKL_DEVICE void write_state(const ForwardParams& params, const Range& range,
                            const ForwardBlock& block, int head_idx, int query_idx,
                            const State& state) {
    if (params.num_splits > 1) {
        const int64 row = (static_cast<int64>(block.batch_idx) * params.num_heads + head_idx) *
                              params.range.num_queries +
                          query_idx;
        write_partial(params, row * params.num_splits + block.split_idx, state);
    } else {
        write_row(params, range, block.batch_idx, head_idx, query_idx, state);
    }
}

template <class State>
SKL_DEVICE State read_partial(const ForwardParams& params, int64 at) {
    const int64 field = params.num_rows * params.num_splits;
    State state;
    state.m1 = params.partials[at];
    state.l1 = params.partials[at + field];
    state.m2 = params.partials[at + 2 * field];
    state.l2 = params.partials[at + 3 * field];
    state.acc = params.partials[at + 4 * field];
    if constexpr (kHasMoment<State>) state.moment1 = params.partials[at + 5 * field];
    return state;
}
