// Tiles of 16-bit units in shared memory: [rows][kHeadDim], swizzled so that neither ldmatrix
// nor 16-byte stores meet a bank conflict, and the copies that fill them. Elements of 4 bytes are
// two units each, so that a tile of them has twice the head dimension here.
#pragma once
#include "base.cuh"
#include "params.cuh"
#if defined(__CUDACC__)
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#endif

// The unit of the layout is the chunk of 16 bytes. Eight neighbouring rows keep the same chunk in
// eight different bank groups: a row of a multiple of 128 bytes permutes its chunks by the row
// modulo 8; rows of 64 or 192 bytes alternate between two halves of the banks by themselves and
// permute by every second row.
template <int kHeadDim>
struct TileLayout {
    static_assert(kHeadDim % 32 == 0, "a row is a multiple of 64 bytes");
    static constexpr int kPitchBytes = kHeadDim * 2;
    static constexpr int kChunks = kHeadDim / 8;
    static constexpr int kPeriod =
        kHeadDim % 64 == 0 ? 8 : 4;  // chunks within which the permutation stays

    SKL_HOST_DEVICE static constexpr int permuted(int row, int chunk) {
        return kPeriod == 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
    }
    SKL_HOST_DEVICE static constexpr int offset_bytes(int row, int chunk) {
        return row * kPitchBytes + permuted(row, chunk) * 16;
    }
};

// One lane's ldmatrix addresses in a tile: row lane_row + 8 a, chunk lane_chunk + 2 b with
// lane_chunk 0 or 1. The permutation is an exclusive or of address bits that neither the tile's
// base nor a whole row touches, so one register reaches all.
template <int kHeadDim>
struct LaneOffset {
    using Layout = TileLayout<kHeadDim>;
    static constexpr int kDistinct = Layout::kPeriod / 2;
    uint32 first;

    SKL_HOST_DEVICE LaneOffset(int lane_row, int lane_chunk)
        : first(Layout::offset_bytes(lane_row, lane_chunk)) {}
    // row must be a multiple of 8; chunk_pair counts pairs of chunks (16 elements).
    SKL_HOST_DEVICE uint32 address(uint32 tile, int row, int chunk_pair) const {
        return ((tile + first) ^ (chunk_pair % kDistinct * 32)) +
               chunk_pair / kDistinct * (kDistinct * 32) + row * Layout::kPitchBytes;
    }
};

// Rows of one head of one tensor in global memory, in units; what lies outside reads as zero.
struct RowsOfHead {
    const uint16* data;
    int64 row_stride;
    int num_rows, head_dim;
};

#if defined(__CUDACC__)
template <class Element>
SKL_DEVICE RowsOfHead rows_of_head(const TensorRef& tensor, int batch_idx, int head_idx,
                                   int num_rows, int head_dim) {
    const uint16* data = static_cast<const uint16*>(tensor.data);
    return {
        data + kUnits<Element> * (batch_idx * tensor.batch_stride + head_idx * tensor.head_stride),
        kUnits<Element> * tensor.row_stride, num_rows, kUnits<Element> * head_dim};
}

// One chunk from global to shared memory; zeros where it is not inside. `readable` is any address
// that may be read.
template <bool kIsAligned>
SKL_DEVICE void copy_chunk(uint32 to, const uint16* from, bool is_inside, const uint16* readable) {
    if constexpr (kIsAligned) {
        cp_async_16(to, is_inside ? from : readable, is_inside);
    } else {
        uint32 v[4] = {0, 0, 0, 0};
        if (is_inside) {
            SKL_UNROLL
            for (int j = 0; j < 4; ++j)
                v[j] = from[2 * j] | static_cast<uint32>(from[2 * j + 1]) << 16;
        }
        store_shared_128(to, v);
    }
}

// Starts the copy of rows [first_row, first_row + kRows) by all threads of the block. Aligned
// tensors go by cp.async; others by guarded 2-byte loads, which are complete when the function
// returns. A thread keeps its chunk and walks down the rows: one pointer and one step, so the copy
// costs the main loop few registers.
template <int kRows, int kHeadDim, int kNumThreads, bool kIsAligned>
SKL_DEVICE void load_tile(uint32 tile, const RowsOfHead& source, int first_row) {
    using Layout = TileLayout<kHeadDim>;
    if constexpr (kNumThreads < Layout::kChunks) {
        // One warp, whose rows have more chunks than it has threads.
        SKL_NO_UNROLL
        for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kNumThreads) {
            const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
            const bool is_inside = first_row + row < source.num_rows && chunk * 8 < source.head_dim;
            copy_chunk<kIsAligned>(tile + Layout::offset_bytes(row, chunk),
                                   source.data + (first_row + row) * source.row_stride + chunk * 8,
                                   is_inside, source.data);
        }
    } else {
        constexpr int kStep =
            kNumThreads / Layout::kChunks;  // rows at a time; threads beyond have nothing to do
        const int thread = threadIdx.x, chunk = thread % Layout::kChunks;
        int row = thread / Layout::kChunks;
        if (kNumThreads % Layout::kChunks != 0 && row >= kStep) return;
        const int num_rows =
            chunk * 8 < source.head_dim ? min_of(kRows, source.num_rows - first_row) : 0;
        const uint16* from = source.data + (first_row + row) * source.row_stride + chunk * 8;
        SKL_UNROLL
        for (int i = 0; i < ceil_div(kRows, kStep);
             ++i, row += kStep, from += kStep * source.row_stride) {
            if (kRows % kStep != 0 && row >= kRows) break;
            const bool is_inside = row < num_rows;
            copy_chunk<kIsAligned>(tile + Layout::offset_bytes(row, chunk), from, is_inside,
                                   source.data);
        }
    }
}

// The same for a tile of packed heads: `source` is the first of them, head_stride leads to the
// next, and `rows` says which head and query a row is.
template <int kRows, int kHeadDim, int kNumThreads, bool kIsAligned, class TileRows>
SKL_DEVICE void load_packed_tile(uint32 tile, const RowsOfHead& source, int64 head_stride,
                                 const TileRows& rows) {
    using Layout = TileLayout<kHeadDim>;
    SKL_NO_UNROLL
    for (int i = threadIdx.x; i < kRows * Layout::kChunks; i += kNumThreads) {
        const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
        const bool is_inside = rows.exists(row, source.num_rows) && chunk * 8 < source.head_dim;
        const uint16* from = source.data + (rows.head(row) - rows.first_head) * head_stride +
                             rows.query(row) * source.row_stride + chunk * 8;
        copy_chunk<kIsAligned>(tile + Layout::offset_bytes(row, chunk), from, is_inside,
                               source.data);
    }
}
#endif
