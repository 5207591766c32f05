// Arithmetic on rows that are finished: parts of their keys become one row, and log-sum-exps of the
// caller's take the place of a row's own.
//
// In float64, because the small KL of a whole is what is left of log-sum-exps of any size, and
// because a row costs no more than a few exponentials. No memory access.
#pragma once
#include "base.cuh"
#include "kl_state.cuh"

// In nats. A row without keys has the log-sum-exp -inf on both sides.
struct FinishedRow {
    double kl, lse1, lse2;
};

SKL_HOST_DEVICE double minus_infinity() { return -1. / 0.; }

SKL_HOST_DEVICE FinishedRow no_keys() { return {0., minus_infinity(), minus_infinity()}; }

// log(e^a + e^b). A NaN stays one.
SKL_HOST_DEVICE double log_add(double a, double b) {
    const double larger = a < b ? b : a, smaller = a < b ? a : b;
    return smaller == minus_infinity() ? larger : larger + log1p(exp(smaller - larger));
}

// What a part adds to the KL of the whole: w1 (kl + log w1 - log w2), its weights being its shares
// of the two sums. One that P1 does not reach adds nothing.
SKL_HOST_DEVICE double kl_of_part(const FinishedRow& part, const FinishedRow& whole) {
    if (part.lse1 == minus_infinity()) return 0.;
    const double log_w1 = part.lse1 - whole.lse1, log_w2 = part.lse2 - whole.lse2;
    return exp(log_w1) * (part.kl + (log_w1 - log_w2));
}

// The row over two disjoint sets of keys, by the chain rule of KL. Beside a part without keys the
// other comes out as it is, bit for bit.
SKL_HOST_DEVICE FinishedRow merge(const FinishedRow& a, const FinishedRow& b) {
    FinishedRow whole = {0., log_add(a.lse1, b.lse1), log_add(a.lse2, b.lse2)};
    whole.kl = kl_of_part(a, whole) + kl_of_part(b, whole);
    return whole;
}

// A row that is divided by given log-sum-exps: kl = sum_j p1_j (log p1_j - log p2_j) with
// p_t,j = e^(s_t,j - lse_t), and mass1 = sum_j p1_j.
struct GivenRow {
    double kl, mass1, lse1, lse2;
};

SKL_HOST_DEVICE bool is_finite_sum(double lse) { return lse - lse == 0.; }

// A given log-sum-exp among those of the kernels, whose logits carry the relative rounding error of
// their scale in base 2: in a difference of two of their own it cancels, at logits of 1000 it would
// be 6e-5 beside one of the caller's.
SKL_HOST_DEVICE double with_error_of_scale(float lse, float error) {
    return lse + static_cast<double>(lse) * error;
}

// Where nothing is given, lse_t is the row's own. A row without keys keeps its -inf, and one that
// is not finite its NaN, so that both are known by them in the backward, too.
SKL_HOST_DEVICE GivenRow divide_by(const FinishedRow& own, double lse1, double lse2) {
    lse1 = is_finite_sum(own.lse1) ? lse1 : own.lse1;
    lse2 = is_finite_sum(own.lse2) ? lse2 : own.lse2;
    if (own.lse1 == minus_infinity()) return {0., 0., lse1, lse2};
    const double log_mass1 = own.lse1 - lse1, mass1 = exp(log_mass1);
    return {mass1 * (own.kl + (log_mass1 - (own.lse2 - lse2))), mass1, lse1, lse2};
}

// As two floats, of which the first is `high` where the value is finite.
SKL_HOST_DEVICE FloatPair split(double value, float high) {
    if (!is_finite_sum(value)) return {static_cast<float>(value), 0.f};
    return {high, static_cast<float>(value - high)};
}

SKL_HOST_DEVICE FloatPair split(double value) { return split(value, static_cast<float>(value)); }
