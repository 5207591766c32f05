// The copy engine: boxes of a tensor map from global to shared memory (sm_90).
#pragma once
#include "../base.cuh"

// What the driver encodes; opaque here. Passed to kernels as const __grid_constant__.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Fetches a tensor map ahead of its first use.
SKL_DEVICE void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of the box at (column, row, head, batch); the barrier counts its bytes.
SKL_DEVICE void tma_load_4d(uint32 destination, const TensorMap* map, int column, int row, int head,
                            int batch, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
        "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}
