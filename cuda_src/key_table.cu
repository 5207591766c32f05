// key_table: the keys that each query of a padded or packed batch sees, and the queries that see
// each key (KeyTable). Lengths are known on the device alone, so this is where they become masks.
//
//   kv_starts, kv_lens, q_lens [B] or cu_seqlens_q, cu_seqlens_k [sequences + 1]
//   ->   of_queries [B][N_Q], of_keys [B][N_K]
//
// Grid: one thread a query or key; all heads share the table.
#include "entries.cuh"
#include "params.cuh"

inline constexpr int kTableThreads = 256;

__global__ void __launch_bounds__(kTableThreads) key_table(const TableParams params) {
    const int64 idx = static_cast<int64>(blockIdx.x) * kTableThreads + threadIdx.x;
    const int64 num_rows = params.num_batches *
                           (params.num_queries + (params.of_keys == nullptr ? 0 : params.num_keys));
    if (idx < num_rows) make_row(params, idx);
}
