// The gradient with respect to one logit, and what it needs of a row. Plain arithmetic.
//
//   side 2 trained, side 1 fixed:   ds2 = P2 - P1
//   side 1 trained, side 2 fixed:   ds1 = P1 ((s1 - s2) - delta),     delta = kl - lse2 + lse1
//
// Everything is in base 2. A row's log-sum-exp is an integer exponent m and a fraction f,
// subtracted one after the other: the first subtraction is one fused multiply-add of numbers that
// nearly cancel, so no accuracy is lost however large the logits are. For side 1 P2 never appears:
// with y_t = s_t - m_t the bracket is (y1 - y2) - shift, shift = kl - f2 + f1.
#pragma once
#include "base.cuh"
#include "kl_state.cuh"

struct alignas(16) RowStatistics {
    float exponent1, fraction1, exponent2;
    float last;  // fraction2 where side 2 is trained, shift where side 1 is
};

// A row that takes no part: every probability is zero.
SKL_HOST_DEVICE RowStatistics no_row() { return {1e30f, 0.f, 1e30f, 0.f}; }

// Statistics of a row whose log-sum-exps are given: those of its own P1 and of side 2, to which the
// logit gradients, divided by mass1, are
//     ds2 = P2 - P1, or -P1 given lse2          ds1 = P1 ((s1 - s2) - delta),
//     delta = kl - lse2 + lse1 as ever, or lse1 - lse2 - 1 given lse1, which is a constant then.
// sum1 is that of the lse1 that was used, the row's own one log(mass1) higher.
template <int kSide>
SKL_HOST_DEVICE RowStatistics given_statistics(Log2Sum sum1, Log2Sum sum2, float kl, float mass1,
                                               bool is_given1, bool is_given2) {
    if (mass1 == 0.f) return no_row();  // nothing of P1 here that float32 could hold
    // The logarithm may be large, and its rounding error would be one of every P1.
    const double fraction = sum1.fraction + log2(static_cast<double>(mass1));
    const double whole = nearbyint(fraction);
    const float moved = static_cast<float>(whole), exponent1 = sum1.exponent + moved,
                fraction1 = static_cast<float>(fraction - whole);
    if (kSide == 2) {
        // Far under any logit: P2 is zero. A NaN stays one.
        const float nowhere = sum2.fraction == sum2.fraction ? no_row().exponent2 : sum2.fraction;
        return {exponent1, fraction1, is_given2 ? nowhere : sum2.exponent,
                is_given2 ? 0.f : sum2.fraction};
    }
    // In the bracket only the difference of the exponents counts, so both move.
    const float constant = is_given1 ? -kLog2E : kl * kLog2E;
    return {exponent1, fraction1, sum2.exponent + moved, constant - sum2.fraction + sum1.fraction};
}

// Relative rounding error of the shift: a sum, a quotient and three products of float32.
inline constexpr float kBracketNoise = 4.76837158203125e-7f;  // 2^-21

// Where P1 is all on one key the bracket is zero, a difference of two numbers of the size of kl.
// What float32 leaves of it is rounding, and |s1 - s2| may be 1e5 times what it should be.
SKL_HOST_DEVICE bool is_noise(float bracket, float shift) {
    return fabs(bracket) < kBracketNoise * fabs(shift);
}

// In units of 1 (side 2) or ln 2 (side 1); gradient_unit puts that right at the end.
template <int kSide>
SKL_HOST_DEVICE float logit_gradient(float x1, float x2, const RowStatistics& row, float scale1,
                                     float scale2) {
    const float y1 = fma(x1, scale1, -row.exponent1), y2 = fma(x2, scale2, -row.exponent2);
    const float p1 = fast_exp2(y1 - row.fraction1);
    if constexpr (kSide == 2) return fast_exp2(y2 - row.last) - p1;
    const float bracket = (y1 - y2) - row.last;
    return p1 * (is_noise(bracket, row.last) ? 0.f : bracket);
}

// What Hopper's kernels read of a row: 16 bytes with the upstream gradient in them, so that a tile
// of rows is one run of bytes. 2^(y - fraction) = 2^y 2^-fraction, and the second factor, which
// lies within sqrt(2) of 1, is multiplied by dkl once a row instead of once an element. Equal sides
// have a ratio of exactly 1, so that their ds2 is exactly zero.
struct alignas(16) WeightedStatistics {
    float exponent1, exponent2;
    float weight;  // dkl 2^-fraction of the trained side, times gradient_unit
    float last;    // ratio 2^(fraction2 - fraction1) where side 2 is trained, shift where side 1 is
};

template <int kSide>
inline constexpr float gradient_unit = kSide == 2 ? 1.f : kLn2;

template <int kSide>
SKL_HOST_DEVICE WeightedStatistics weighted(const RowStatistics& row, float dkl) {
    const float fraction = kSide == 2 ? row.last : row.fraction1;
    return {row.exponent1, row.exponent2, dkl * gradient_unit<kSide> * exp2(-fraction),
            kSide == 2 ? exp2(row.last - row.fraction1) : row.last};
}

// dkl logit_gradient, in units of 1.
template <int kSide>
SKL_HOST_DEVICE float weighted_gradient(float x1, float x2, const WeightedStatistics& row,
                                        float scale1, float scale2) {
    const float y1 = fma(x1, scale1, -row.exponent1), y2 = fma(x2, scale2, -row.exponent2);
    if constexpr (kSide == 2) return fma(-fast_exp2(y1), row.last, fast_exp2(y2)) * row.weight;
    const float bracket = (y1 - y2) - row.last;
    return fast_exp2(y1) * row.weight * (is_noise(bracket, row.last) ? 0.f : bracket);
}

// dkl logit_gradient of both sides, in units of 1: side 1's statistics and side 2's weight are
// enough, because the weight of P1 is the same in both but for gradient_unit.
struct PairOfGradients {
    float side1, side2;
};

SKL_HOST_DEVICE PairOfGradients weighted_gradients(float x1, float x2,
                                                   const WeightedStatistics& row1, float weight2,
                                                   float scale1, float scale2) {
    const float y1 = fma(x1, scale1, -row1.exponent1), y2 = fma(x2, scale2, -row1.exponent2);
    const float p1 = fast_exp2(y1) * row1.weight, p2 = fast_exp2(y2) * weight2;
    const float bracket = (y1 - y2) - row1.last;
    return {p1 * (is_noise(bracket, row1.last) ? 0.f : bracket),
            fma(p1, -1.f / gradient_unit<1>, p2)};
}
