// reduce_splits: merges the raw states that the splits of forward_sm80 left, and finishes the rows.
//
//   partials [5][rows][num_splits]   ->   rows [B, H, N_Q]
//
// Grid: one warp per row, four warps a block. Splits go to lanes in a fixed pattern and lanes merge
// in a fixed tree, so the result does not depend on the order in which the splits were computed.
#include "kl_state.cuh"
#include "params.cuh"
#include "write_rows.cuh"

inline constexpr int kRowsPerBlock = 4;

__global__ void __launch_bounds__(32 * kRowsPerBlock) reduce_splits(const ForwardParams params) {
    const int64 row = static_cast<int64>(blockIdx.x) * kRowsPerBlock + threadIdx.x / 32;
    if (row >= params.num_rows) return;
    const int lane = threadIdx.x % 32;

    KlState state = empty_state();
    for (int split_idx = lane; split_idx < params.num_splits; split_idx += 32) {
        state = merge(state, read_partial(params, row * params.num_splits + split_idx));
    }
    state = merge_lanes<16>(state);
    if (lane != 0) return;
    const int num_queries = params.range.num_queries;
    const int query_idx = static_cast<int>(row % num_queries),
              head_of_batch = static_cast<int>(row / num_queries);
    write_row(params, head_of_batch / params.num_heads, head_of_batch % params.num_heads, query_idx,
              state);
}
