// replace_lse: the rows of a forward, divided by log-sum-exps of the caller's instead of their own.
//
//   own kl, lse1, lse2, low parts [B, H, N_Q], given lse1 and lse2   ->   kl, lse1, lse2, low
//   parts, mass1
//
// Grid: one thread a row. The own kl may lie where the result goes: a row is read before it is
// written.
#include "finished_rows.cuh"
#include "params.cuh"
#include "read_rows.cuh"

inline constexpr int kReplaceThreads = 256;

__global__ void __launch_bounds__(kReplaceThreads) replace_lse(const ReplaceParams params) {
    const int64 row = static_cast<int64>(blockIdx.x) * kReplaceThreads + threadIdx.x;
    if (row >= params.num_rows) return;
    const int query_idx = static_cast<int>(row % params.num_queries);
    const int64 head_of_batch = row / params.num_queries;
    const int64 batch_idx = head_of_batch / params.num_heads,
                head_idx = head_of_batch % params.num_heads;
    const auto offset = [&](const RowsRef& rows) {
        return batch_idx * rows.batch_stride + head_idx * rows.head_stride +
               query_idx * rows.row_stride;
    };
    const int64 at = offset(params.rows);
    const FinishedRow own = read_row(params.own, at);
    const bool is_given1 = params.given1 != nullptr, is_given2 = params.given2 != nullptr;
    const float given1 = is_given1 ? params.given1[offset(params.given1_rows)] : 0.f,
                given2 = is_given2 ? params.given2[offset(params.given2_rows)] : 0.f;
    const GivenRow result =
        divide_by(own, is_given1 ? with_error_of_scale(given1, params.scale1_error) : own.lse1,
                  is_given2 ? with_error_of_scale(given2, params.scale2_error) : own.lse2);
    // High is the very value that was given, and low what makes it one of the kernels' own.
    const FloatPair lse1 = is_given1 ? split(result.lse1, given1) : split(result.lse1),
                    lse2 = is_given2 ? split(result.lse2, given2) : split(result.lse2);
    params.kl[at] = static_cast<float>(result.kl);
    const auto write = [&](float* values, float value) {
        if (values != nullptr) values[at] = value;
    };
    write(params.lse1, lse1.high);
    write(params.lse2, lse2.high);
    write(params.lse1_low, lse1.low);
    write(params.lse2_low, lse2.low);
    write(params.mass1, static_cast<float>(result.mass1));
}
