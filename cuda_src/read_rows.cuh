// Rows of a state as the kernels of finished rows read them.
#pragma once
#include "finished_rows.cuh"
#include "params.cuh"

SKL_DEVICE double read_sum(const float* high, const float* low, int64 at) {
    return static_cast<double>(high[at]) + (low == nullptr ? 0. : static_cast<double>(low[at]));
}

SKL_DEVICE FinishedRow read_row(const StateRef& state, int64 at) {
    return {state.kl[at], read_sum(state.lse1, state.lse1_low, at),
            read_sum(state.lse2, state.lse2_low, at)};
}
