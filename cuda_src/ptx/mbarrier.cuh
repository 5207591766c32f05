// mbarrier: a barrier in shared memory that counts arrivals and bytes (sm_90).
#pragma once
#include "../base.cuh"

SKL_DEVICE void mbarrier_init(uint32 barrier, uint32 num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals));
}

// One lane arrives for its warp, behind a __syncwarp. The race checker believes only lanes that
// arrive themselves; for it a test builds kernels in which all do.
inline constexpr bool kAllLanesArrive = false;
inline constexpr int kArrivalsOfWarp = kAllLanesArrive ? 32 : 1;

// Makes initialised barriers visible to the copy engine.
SKL_DEVICE void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
}

SKL_DEVICE void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

SKL_DEVICE void mbarrier_arrive_warp(uint32 barrier, int lane) {
    if (kAllLanesArrive || lane == 0) mbarrier_arrive(barrier);
}

SKL_DEVICE void mbarrier_arrive_expect_bytes(uint32 barrier, uint32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

// Returns once the phase of this parity has completed.
SKL_DEVICE void mbarrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "TRY_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni DONE_%=;\n"
        "bra.uni TRY_%=;\n"
        "DONE_%=:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
