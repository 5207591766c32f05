// reduce_splits: merges the raw states that the splits of the forward left, and finishes the rows.
//
//   partials [5 or 6][rows][num_splits]   ->   rows [B, H, N_Q]
//
// Grid: kLanesPerRow neighbouring lanes a row, 128 threads a block. Splits go to lanes in a fixed
// pattern and lanes merge in a fixed tree, so the result does not depend on the order in which the
// splits were computed.
#include "kl_state.cuh"
#include "params.cuh"
#include "write_rows.cuh"

inline constexpr int kNumThreads = 128;

template <int kLanesPerRow, bool kHasEntropy>
__global__ void __launch_bounds__(kNumThreads) reduce_splits(const ForwardParams params) {
    constexpr int kRowsPerBlock = kNumThreads / kLanesPerRow;
    const int64 row = static_cast<int64>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanesPerRow;
    const int lane = threadIdx.x % kLanesPerRow;
    const bool exists = row < params.num_rows;  // all lanes of a warp take part in the merge

    using State = StateOf<kHasEntropy>;
    State state = empty_state<State>();
    if (exists) {
        for (int split_idx = lane; split_idx < params.num_splits; split_idx += kLanesPerRow) {
            state = merge(state, read_partial<State>(params, row * params.num_splits + split_idx));
        }
    }
    state = merge_lanes<kLanesPerRow / 2>(state);
    if (!exists || lane != 0) return;
    const int num_queries = params.range.num_queries;
    const int query_idx = static_cast<int>(row % num_queries),
              head_of_batch = static_cast<int>(row / num_queries);
    const int batch_idx = head_of_batch / params.num_heads,
              head_idx = head_of_batch % params.num_heads;
    if (params.table.of_queries == nullptr) {
        write_row(params, range_of_entry<kWindow>(params, batch_idx), batch_idx, head_idx,
                  query_idx, state);
    } else {
        write_row(params, range_of_entry<kRagged>(params, batch_idx), batch_idx, head_idx,
                  query_idx, state);
    }
}
