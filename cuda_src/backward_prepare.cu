// backward_prepare: per query row, what the gradients need of the forward's results; for float16
// also the largest |dkl|.
//
//   kl, lse1, lse2, their low parts, dkl [B, H, N_Q]   ->   row_statistics [rows][4], max_dkl
//
// The statistics are those of gradient.cuh, with dkl in them (kIsWeighted) or without.
//
// With given log-sum-exps every logit gradient is mass1 times one of the row's own P1, so the row's
// own statistics serve as they do without, and dkl mass1 takes the place of dkl.
//
// Grid: one thread per row. max_dkl must be zero before the launch.
#include "gradient.cuh"
#include "kl_state.cuh"
#include "params.cuh"

inline constexpr int kPrepareThreads = 256;

template <int kSide>
SKL_DEVICE RowStatistics row_statistics(const PrepareParams& params, int64 at) {
    const float lse1 = params.lse1[at], lse2 = params.lse2[at];
    const float minus_infinity = -1.f / 0.f;
    if (lse1 == minus_infinity && lse2 == minus_infinity) return no_row();
    const Log2Sum sum1 = to_log2(lse1, params.lse1_low == nullptr ? 0.f : params.lse1_low[at]);
    const Log2Sum sum2 = to_log2(lse2, params.lse2_low == nullptr ? 0.f : params.lse2_low[at]);
    if (params.mass1 != nullptr) {
        return given_statistics<kSide>(sum1, sum2, params.kl[at], params.mass1[at],
                                       params.is_given1, params.is_given2);
    }
    const float last =
        kSide == 2 ? sum2.fraction : params.kl[at] * kLog2E - sum2.fraction + sum1.fraction;
    return {sum1.exponent, sum1.fraction, sum2.exponent, last};
}

template <int kSide, bool kIsWeighted>
__global__ void __launch_bounds__(kPrepareThreads) backward_prepare(const PrepareParams params) {
    const int64 row = static_cast<int64>(blockIdx.x) * kPrepareThreads + threadIdx.x;
    uint32 magnitude = 0;
    if (row < params.num_rows) {
        const int query_idx = static_cast<int>(row % params.num_queries);
        const int64 head_of_batch = row / params.num_queries;
        const int64 batch_idx = head_of_batch / params.num_heads,
                    head_idx = head_of_batch % params.num_heads;
        const auto offset = [&](const RowsRef& rows) {
            return batch_idx * rows.batch_stride + head_idx * rows.head_stride +
                   query_idx * rows.row_stride;
        };
        const int64 at = offset(params.rows);
        const RowStatistics statistics = row_statistics<kSide>(params, at);
        float dkl = params.dkl[offset(params.dkl_rows)];
        if (params.mass1 != nullptr) params.weighted_dkl[at] = dkl *= params.mass1[at];
        if constexpr (kIsWeighted) {
            reinterpret_cast<WeightedStatistics*>(params.row_statistics)[row] =
                weighted<kSide>(statistics, dkl);
        } else {
            reinterpret_cast<RowStatistics*>(params.row_statistics)[row] = statistics;
        }
        if (params.max_dkl != nullptr) {
            magnitude = __float_as_uint(dkl) & 0x7fffffffu;
            // Inf and NaN reach the gradients, not the factor; rows without keys reach neither.
            if (magnitude >= 0x7f800000u || statistics.exponent1 == no_row().exponent1)
                magnitude = 0;
        }
    }
    if (params.max_dkl == nullptr) return;
    // Bits of non-negative floats order as integers.
    magnitude = __reduce_max_sync(~0u, magnitude);
    if (threadIdx.x % 32 == 0 && magnitude != 0) atomicMax(params.max_dkl, magnitude);
}
