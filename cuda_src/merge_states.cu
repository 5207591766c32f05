// merge_states: rows over disjoint sets of keys become the rows over all of them.
//
//   states [num_states][kl, lse1, lse2, their low parts][rows]   ->   the same of the whole [rows]
//
// Grid: one thread a row, which folds the states from the first to the last. The result may be the
// first state: a row is read before it is written.
#include "finished_rows.cuh"
#include "params.cuh"
#include "read_rows.cuh"

inline constexpr int kMergeThreads = 256;

__global__ void __launch_bounds__(kMergeThreads) merge_states(const MergeParams params) {
    const int64 row = static_cast<int64>(blockIdx.x) * kMergeThreads + threadIdx.x;
    if (row >= params.num_rows) return;
    FinishedRow whole = read_row(params.states[0], row);
    SKL_NO_UNROLL
    for (int i = 1; i < params.num_states; ++i) {
        whole = merge(whole, read_row(params.states[i], row));
    }
    const FloatPair lse1 = split(whole.lse1), lse2 = split(whole.lse2);
    params.kl[row] = static_cast<float>(whole.kl);
    params.lse1[row] = lse1.high;
    params.lse2[row] = lse2.high;
    if (params.lse1_low != nullptr) params.lse1_low[row] = lse1.low;
    if (params.lse2_low != nullptr) params.lse2_low[row] = lse2.low;
}
