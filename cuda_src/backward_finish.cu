// backward_finish: the float32 dQ that the fused backward summed, scaled and rounded into the
// caller's array.
//
//   dq_scratch [B H][row tiles of 16][kHeadDim / 8][32 lanes][4]   ->   dq [B, H, N_Q, D]
//
// Where queries of heads that share a key head were the rows of one tile (RowsOfKey), so they are
// in the scratch.
//
// Grid: one thread per four scratch values (2 rows x 2 columns of an accumulator tile), one block
// row per (batch, head or heads that share a tile).
#include "fragment.cuh"
#include "params.cuh"

inline constexpr int kFinishThreads = 256;

template <class Element, int kHeadDim>
__global__ void __launch_bounds__(kFinishThreads) backward_finish(const FinishParams params) {
    constexpr int kColTiles = kHeadDim / 8;
    const int64 per_head = static_cast<int64>(params.num_row_tiles) * kColTiles * 32;
    const int blocks_per_head = static_cast<int>((per_head + kFinishThreads - 1) / kFinishThreads);
    const int head_of_batch = blockIdx.x / blocks_per_head;
    const int64 idx =
        static_cast<int64>(blockIdx.x % blocks_per_head) * kFinishThreads + threadIdx.x;
    if (idx >= per_head) return;
    const int lane = static_cast<int>(idx % 32), col_tile = static_cast<int>(idx / 32 % kColTiles);
    const int row_tile = static_cast<int>(idx / 32 / kColTiles);
    const int col = col_tile * 8 + 2 * (lane % 4);
    if (col >= params.head_dim) return;

    const float4 sums = reinterpret_cast<const float4*>(
        params.dq_scratch)[static_cast<int64>(head_of_batch) * per_head + idx];
    const int tiles_per_batch = params.num_heads / params.heads_per_tile;
    uint16* dq =
        static_cast<uint16*>(params.dq) +
        head_of_batch / tiles_per_batch * params.dq_rows.batch_stride +
        head_of_batch % tiles_per_batch * params.heads_per_tile * params.dq_rows.head_stride;
    const float scale = params.gradient_scale;
    SKL_UNROLL
    for (int half = 0; half < 2; ++half) {
        const int row = row_tile * 16 + half * 8 + lane / 4;
        const int query = row / params.heads_per_tile, head = row % params.heads_per_tile;
        if (query >= params.num_queries) continue;
        *reinterpret_cast<uint32*>(dq + head * params.dq_rows.head_stride +
                                   query * params.dq_rows.row_stride + col) =
            half == 0 ? pack<Element>(sums.x * scale, sums.y * scale)
                      : pack<Element>(sums.z * scale, sums.w * scale);
    }
}
