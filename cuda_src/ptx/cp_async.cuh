// cp.async: 16 bytes from global to shared memory without a register in between (sm_80 and up).
#pragma once
#include "../base.cuh"

// Copies 16 bytes, or writes 16 zero bytes when is_inside is false (the source is then not read).
SKL_DEVICE void cp_async_16(uint32 destination, const void* source, bool is_inside) {
    const int source_bytes = is_inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
                 "l"(source), "r"(source_bytes)
                 : "memory");
}

// The same for one 4-byte value.
SKL_DEVICE void cp_async_4(uint32 destination, const void* source, bool is_inside) {
    const int source_bytes = is_inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
                 "r"(source_bytes)
                 : "memory");
}

SKL_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
SKL_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
