// Tiles and products of a warpgroup: panels of 64 columns as the copy engine writes them with its
// 128-byte swizzle.
#pragma once
#include "base.cuh"
#include "fragment.cuh"
#include "gradient.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

struct InputMaps {
    TensorMap q1, k1, q2, k2;
};

// [panels of 64 columns][rows][128 bytes]. The last panel of a head dim that is no multiple of 64
// is padded with zeros.
template <int kHeadDim>
struct PanelTile {
    static constexpr int kPanels = ceil_div(kHeadDim, 64);
    SKL_HOST_DEVICE static constexpr int num_bytes(int num_rows) {
        return kPanels * num_rows * 128;
    }

    template <int kRows>
    SKL_DEVICE static void load(uint32 tile, const TensorMap& map, int first_row, int head,
                                int batch, uint32 barrier) {
        SKL_UNROLL
        for (int panel = 0; panel < kPanels; ++panel) {
            tma_load_4d(tile + panel * kRows * 128, &map, panel * 64, first_row, head, batch,
                        barrier);
        }
    }
};

// An axis along which a tensor is expanded has a single step in its map.
SKL_DEVICE int map_index(int64 stride, int idx) { return stride == 0 ? 0 : idx; }

// Where a product finds 64 columns wide rows of 128 bytes, swizzled, eight rows to 1024 bytes. A
// transposed operand of more than 64 columns goes on in the panel panel_bytes further.
SKL_DEVICE uint64 panel_descriptor(uint32 address, int panel_bytes = 16) {
    return static_cast<uint64>((address & 0x3ffff) >> 4) |
           static_cast<uint64>(panel_bytes >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// The place so many units of 16 bytes further; an address never carries into the upper half.
SKL_DEVICE uint64 descriptor_after(uint64 descriptor, int units) {
    return (descriptor & 0xffffffff00000000ull) |
           static_cast<uint32>(static_cast<uint32>(descriptor) + units);
}

// Step k of 16 columns within the panels of a tile, in descriptor units of 16 bytes.
SKL_HOST_DEVICE constexpr int panel_step(int k, int num_rows) {
    return k / 4 * (num_rows * 8) + k % 4 * 2;
}

// Where a chunk of 16 bytes lies: the swizzle permutes the eight chunks of a row by the row.
SKL_DEVICE uint32 panel_address(uint32 tile, int tile_rows, int row, int panel, int chunk) {
    return tile + panel * tile_rows * 128 + row * 128 + ((chunk ^ (row & 7)) << 4);
}

// The 64 rows of a warpgroup as left operands, read from shared memory by every product.
template <int kHeadDim>
struct PanelShared {
    uint64 descriptor;
    int num_rows;
    SKL_DEVICE void load(uint32 tile, int tile_rows, int first_row) {
        descriptor = panel_descriptor(tile + first_row * 128);
        num_rows = tile_rows;
    }
    SKL_DEVICE uint64 operand(int k) const { return descriptor + panel_step(k, num_rows); }
};

// The same kept in registers.
template <int kHeadDim>
struct PanelRegisters {
    uint32 a[kHeadDim / 16][4];
    SKL_DEVICE void load(uint32 tile, int tile_rows, int first_row) {
        const int row = first_row + 16 * (warp_id() % 4) + (lane_id() & 15);
        SKL_UNROLL
        for (int k = 0; k < kHeadDim / 16; ++k) {
            ldmatrix_x4(a[k],
                        panel_address(tile, tile_rows, row, k / 4, k % 4 * 2 + (lane_id() >> 4)));
        }
    }
    SKL_DEVICE const uint32 (&operand(int k) const)[4] { return a[k]; }
};

// The first kRegisterSteps steps of 16 columns in registers, the others in shared memory.
template <int kHeadDim, int kRegisterSteps, int kTileRows>
struct PanelMixed {
    static constexpr int kSteps = kHeadDim / 16;
    static_assert(kRegisterSteps <= kSteps, "no more steps than there are");
    uint64 descriptor;
    uint32 a[max_of(kRegisterSteps, 1)][4];

    SKL_DEVICE void load(uint32 tile, int first_row) {
        descriptor = panel_descriptor(tile + first_row * 128);
        const int row = first_row + 16 * (warp_id() % 4) + (lane_id() & 15);
        SKL_UNROLL
        for (int k = 0; k < kRegisterSteps; ++k) {
            ldmatrix_x4(a[k],
                        panel_address(tile, kTileRows, row, k / 4, k % 4 * 2 + (lane_id() >> 4)));
        }
    }
    // S = these rows times the kCols rows of a tile; asynchronous until wgmma_wait.
    template <class Element, int kCols>
    SKL_DEVICE void multiply(float (&s)[2][kCols / 4], uint32 tile) const {
        const uint64 b = panel_descriptor(tile);
        if constexpr (kRegisterSteps > 0) {
            Wgmma<Element, kCols>::start(s, a[0], b);
        } else {
            Wgmma<Element, kCols>::start(s, descriptor, b);
        }
        SKL_UNROLL
        for (int k = 1; k < kRegisterSteps; ++k) {
            Wgmma<Element, kCols>::add(s, a[k], descriptor_after(b, panel_step(k, kCols)));
        }
        SKL_UNROLL
        for (int k = max_of(kRegisterSteps, 1); k < kSteps; ++k) {
            Wgmma<Element, kCols>::add(s, descriptor_after(descriptor, panel_step(k, kTileRows)),
                                       descriptor_after(b, panel_step(k, kCols)));
        }
    }
};

// S = queries times the kCols rows of a tile; asynchronous until wgmma_wait.
template <class Element, int kHeadDim, int kCols, class Queries>
SKL_DEVICE void multiply_panels(float (&s)[2][kCols / 4], const Queries& queries, uint32 tile) {
    const uint64 keys = panel_descriptor(tile);
    Wgmma<Element, kCols>::start(s, queries.operand(0), keys);
    SKL_UNROLL
    for (int k = 1; k < kHeadDim / 16; ++k) {
        Wgmma<Element, kCols>::add(s, queries.operand(k), keys + panel_step(k, kCols));
    }
}

template <int kLines, int kElements>
SKL_DEVICE void pin_all(float (&values)[kLines][kElements]) {
    SKL_UNROLL
    for (int line = 0; line < kLines; ++line) {
        SKL_UNROLL
        for (int e = 0; e < kElements; ++e) pin(values[line][e]);
    }
}

// summed[a warp's 16 rows][kCols] += a times 16 rows of panels, columns [16 first_pair, ...), whose
// broken elements read as zero: warp by warp, for the few tiles in which a zero of a would meet a
// NaN or Inf. No product of the warpgroup may be under way on summed.
template <class Element, int kCols>
SKL_DEVICE void add_scrubbed(float (&summed)[2][kCols / 4], const uint32 (&a)[4], uint32 tile,
                             int tile_rows, int first_row, int first_pair) {
    const int row = first_row + (lane_id() & 15);
    const uint32 left[1][4] = {{a[0], a[1], a[2], a[3]}};
    SKL_UNROLL
    for (int i = 0; i < kCols / 16; ++i) {
        const int pair = first_pair + i;
        uint32 b[4];
        ldmatrix_x4_trans(
            b, panel_address(tile, tile_rows, row, pair / 4, pair % 4 * 2 + (lane_id() >> 4)));
        SKL_UNROLL
        for (int j = 0; j < 4; ++j) b[j] = finite_or_zero<Element>(b[j]);
        multiply_step<Element, 1>(summed, left, b, i);
    }
}
