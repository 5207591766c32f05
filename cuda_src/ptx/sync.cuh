// Registers moved between warpgroups (sm_90a), and barriers of some warps of a block.
#pragma once
#include "../base.cuh"

template <int kRegisters>
SKL_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
SKL_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A barrier of the warps that name it, kThreads threads in all; 0 is that of __syncthreads.
template <int kThreads>
SKL_DEVICE void named_barrier_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The part of a warp that others wait for and that does not wait itself.
template <int kThreads>
SKL_DEVICE void named_barrier_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Waits like the first; returns whether the condition holds for any thread. The vote changes
// nothing but that the compiler knows the answer to be that of the whole warp.
template <int kThreads>
SKL_DEVICE bool named_barrier_any(int barrier, bool condition) {
    int any;
    asm volatile(
        "{.reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.b32 %0, 1, 0, "
        "q;}"
        : "=r"(any)
        : "r"(static_cast<int>(condition)), "r"(barrier), "n"(kThreads)
        : "memory");
    return __any_sync(~0u, any != 0) != 0;
}
