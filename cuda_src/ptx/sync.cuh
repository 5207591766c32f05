// Registers moved between warpgroups (sm_90a).
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
