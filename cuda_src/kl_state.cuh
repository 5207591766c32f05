// The running state of one row, KlState: start, update, merge, finish. Pure arithmetic, no memory
// access.
//
// A row is reduced in one pass over its keys (StreamKL, Algorithm 1) to
//     m_t   a reference exponent of side t, an integer (base 2)
//     l_t   sum_j e_t,j                        with y_t,j = s_t,j log2(e) - m_t,   e_t,j = 2^y_t,j
//     acc   sum_j e_1,j (y_1,j - y_2,j)
// and then KL / ln 2 = acc / l1 + log2 l2 - log2 l1, in which m1 and m2 cancel: a common offset of
// the logits never meets the small KL.
//
// The maximum is optimistic. The usual online softmax raises m to the maximum of every tile before
// it sums. Here a tile is first summed with the m at hand; float32 has exponents to spare, so
// nothing overflows. Only when a partial sum passes 2^16 (or is NaN) is m raised to the ceiling of
// the tile's maximum, the state rescaled and the tile summed again. A later limit would be as safe,
// but y grows with it, and its rounding error is what a small KL is made of: with 2^64 logits that
// rise by 40 cost two digits. An m is never set from the start: the unset m lies so low that the
// first key a row may see overflows its sum. m is an integer, so every rescaling is by an exact
// power of two, and the state of a thread may stay its own (its columns of its rows) until the end.
#pragma once
#include "base.cuh"

// In units of log2: far under any logit, and a masked logit far under that.
inline constexpr float kUnsetMax = -1e16f;
inline constexpr float kMaskedLogit = -1e18f;
inline constexpr float kRaiseAbove = 65536.f;
inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr float kLn2Low = -1.90465429995776804525e-9f;  // ln 2 - kLn2
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLog2ELow = 1.92596299112661746887e-8f;  // log2 e - kLog2E

struct KlState {
    float m1, l1, m2, l2, acc;
};

// The same with what the entropy of P1 needs besides: sum_j e_1,j y_1,j.
struct EntropyState : KlState {
    float moment1;
};

template <bool kHasEntropy>
using StateOf = typename Choose<kHasEntropy, EntropyState, KlState>::Type;

template <class State>
inline constexpr bool kHasMoment = is_same<State, EntropyState>;

template <class State = KlState>
SKL_HOST_DEVICE State empty_state() {
    State state{};
    state.m1 = state.m2 = kUnsetMax;
    return state;
}

// Moves the reference exponents up to m1 and m2 (never down).
template <class State>
SKL_HOST_DEVICE void raise_maxima(State& state, float m1, float m2) {
    const float up1 = m1 - state.m1, up2 = m2 - state.m2;
    const float shrink1 = fast_exp2(-up1);
    if constexpr (kHasMoment<State>) {
        state.moment1 = shrink1 * (state.moment1 - state.l1 * up1);
    }
    state.acc = shrink1 * (state.acc - state.l1 * (up1 - up2));
    state.l1 *= shrink1;
    state.l2 *= fast_exp2(-up2);
    state.m1 = m1;
    state.m2 = m2;
}

// Adds kCols keys to each of kRows rows. x_t are raw dot products; scale_t takes them to base 2 and
// may have any sign.
template <class State, int kRows, int kCols>
SKL_HOST_DEVICE void update(State (&state)[kRows], float (&x1)[kRows][kCols],
                            float (&x2)[kRows][kCols], float scale1, float scale2) {
    float sum1[kRows], sum2[kRows], sum_acc[kRows], sum_moment1[kRows];
    bool raise = false;
    // At most two passes, whatever the data: the second leaves unconditionally, so NaN cannot hang
    // it.
    SKL_NO_UNROLL
    for (;;) {
        if (raise) {
            SKL_UNROLL
            for (int row = 0; row < kRows; ++row) {
                float max1 = state[row].m1, max2 = state[row].m2;
                SKL_UNROLL
                for (int col = 0; col < kCols; ++col) {
                    // Pinned here, or the compiler takes the maximum on the common path, too.
                    pin(x1[row][col]);
                    pin(x2[row][col]);
                    max1 = fmax(max1, x1[row][col] * scale1);
                    max2 = fmax(max2, x2[row][col] * scale2);
                }
                raise_maxima(state[row], ceil(max1), ceil(max2));
            }
        }
        SKL_UNROLL
        for (int row = 0; row < kRows; ++row) sum1[row] = sum2[row] = sum_acc[row] = 0.f;
        if constexpr (kHasMoment<State>) {
            SKL_UNROLL
            for (int row = 0; row < kRows; ++row) sum_moment1[row] = 0.f;
        }
        // The order, columns of two rows by turns and acc first, is the one in which ptxas spreads
        // the exponentials best (README, Measured). Where a thread has four rows, two at a time
        // would spill.
        constexpr int kTogether = kRows % 2 == 0 ? 2 : 1;
        SKL_UNROLL
        for (int first = 0; first < kRows; first += kTogether) {
            SKL_UNROLL
            for (int col = 0; col < kCols; ++col) {
                SKL_UNROLL
                for (int row = first; row < first + kTogether; ++row) {
                    const float y1 = fma(x1[row][col], scale1, -state[row].m1);
                    const float y2 = fma(x2[row][col], scale2, -state[row].m2);
                    const float e1 = fast_exp2(y1);
                    sum_acc[row] = fma(e1, y1 - y2, sum_acc[row]);
                    if constexpr (kHasMoment<State>) {
                        sum_moment1[row] = fma(e1, y1, sum_moment1[row]);
                    }
                    sum2[row] += fast_exp2(y2);
                    sum1[row] += e1;
                }
            }
        }
        float largest = 0.f;
        SKL_UNROLL
        for (int row = 0; row < kRows; ++row) {
            // Pinned inside the loop, or the sums sink past it and everything they need stays
            // alive.
            pin(sum1[row]);
            pin(sum2[row]);
            pin(sum_acc[row]);
            if constexpr (kHasMoment<State>) pin(sum_moment1[row]);
            // A NaN must count as too large; fmax would drop it, a sum keeps it.
            largest += sum1[row] + sum2[row];
        }
        if (raise || largest < kRaiseAbove) break;
        raise = true;
    }
    SKL_UNROLL
    for (int row = 0; row < kRows; ++row) {
        state[row].l1 += sum1[row];
        state[row].l2 += sum2[row];
        state[row].acc += sum_acc[row];
        if constexpr (kHasMoment<State>) state[row].moment1 += sum_moment1[row];
    }
}

// The state of two disjoint sets of keys together (the paper's equation 11). Empty states need no
// special case.
template <class State>
SKL_HOST_DEVICE State merge(State a, State b) {
    const float m1 = fmax(a.m1, b.m1), m2 = fmax(a.m2, b.m2);
    raise_maxima(a, m1, m2);
    raise_maxima(b, m1, m2);
    a.l1 += b.l1;
    a.l2 += b.l2;
    a.acc += b.acc;
    if constexpr (kHasMoment<State>) a.moment1 += b.moment1;
    return a;
}

// A number as the unevaluated sum of two floats.
struct FloatPair {
    float high, low;
};

SKL_HOST_DEVICE FloatPair exact_sum(float a, float b) {
    const float sum = a + b, of_b = sum - a;
    return {sum, (a - (sum - of_b)) + (b - of_b)};
}

SKL_HOST_DEVICE FloatPair exact_product(float a, float b) {
    float product = a * b;
    // Pinned, or a later sum takes the unrounded product in and its error counts twice.
    pin(product);
    return {product, fma(a, b, -product)};
}

// (exponent + log2_sum) ln 2, exact to about twice float32.
SKL_HOST_DEVICE FloatPair to_nats(float exponent, float log2_sum) {
    const FloatPair whole = exact_product(exponent, kLn2), part = exact_product(log2_sum, kLn2);
    const FloatPair sum = exact_sum(whole.high, part.high);
    const float low = sum.low + whole.low + part.low + exponent * kLn2Low + log2_sum * kLn2Low;
    return exact_sum(sum.high, low);
}

// A log-sum-exp as an integer exponent and a fraction, base 2: what the gradients are computed
// from.
struct Log2Sum {
    float exponent, fraction;
};

SKL_HOST_DEVICE Log2Sum to_log2(float lse, float lse_low) {
    const FloatPair product = exact_product(lse, kLog2E);
    const float exponent = nearbyint(product.high);
    const float low = product.low + lse * kLog2ELow + lse_low * kLog2E;
    return {exponent, (product.high - exponent) + low};
}

// What a row is reported as, in nats.
struct RowResult {
    float kl;
    FloatPair lse1, lse2;
};

// log2 of a sum over at least one key. Every finite logit leaves a sum of at least a half, so zero
// means that all were -inf, a distribution that does not exist.
SKL_HOST_DEVICE float log2_of_sum(float sum) { return sum == 0.f ? sum / sum : log2(sum); }

// The only place that meets an empty row: no key at all gives KL 0 and log-sum-exp -inf. A row of
// NaN is not empty.
SKL_HOST_DEVICE RowResult finish(const KlState& state) {
    if (state.l1 == 0.f && state.l2 == 0.f && state.acc == 0.f) {
        const float minus_infinity = -1.f / 0.f;
        return {0.f, {minus_infinity, 0.f}, {minus_infinity, 0.f}};
    }
    const float log_l1 = log2_of_sum(state.l1), log_l2 = log2_of_sum(state.l2);
    // One logarithm of the quotient: the difference of two would lose a small KL.
    return {kLn2 * (state.acc / state.l1 + log2_of_sum(state.l2 / state.l1)),
            to_nats(state.m1, log_l1), to_nats(state.m2, log_l2)};
}

// The entropy of P1, in nats: lse1 less the mean logit, in which m1 cancels. 0 without keys.
SKL_HOST_DEVICE float entropy_of(const EntropyState& state) {
    if (state.l1 == 0.f && state.l2 == 0.f && state.acc == 0.f) return 0.f;
    return kLn2 * (log2_of_sum(state.l1) - state.moment1 / state.l1);
}
