// The copy engine on plain runs of bytes: into shared memory, and sums out of it (sm_90). Addresses
// and sizes are multiples of 16.
#pragma once
#include "../base.cuh"

// Starts the copy of a run of bytes; the barrier counts them.
SKL_DEVICE void bulk_load(uint32 destination, const void* source, uint32 num_bytes,
                          uint32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(destination),
        "l"(source), "r"(num_bytes), "r"(barrier)
        : "memory");
}

// Adds floats in shared memory to global memory, in an order among blocks that is not fixed. A
// group of its own, of the thread that calls.
SKL_DEVICE void bulk_reduce_add(float* destination, uint32 source, uint32 num_bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
        "cp.async.bulk.commit_group;" ::"l"(destination),
        "r"(source), "r"(num_bytes)
        : "memory");
}

// Returns once all but kPending groups have read their shared memory.
template <int kPending>
SKL_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Returns once all groups are done.
SKL_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Lets the copy engine and wgmma see what this thread has written to shared memory.
SKL_DEVICE void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
