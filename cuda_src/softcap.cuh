// Soft bounds of logits: s becomes c tanh(s / c), a value between -c and c. Plain arithmetic.
//
// A kernel with kHasSoftcap turns the raw dot product x of a side with a bound into
// tanh(x tanh_scale), tanh_scale = scale / c, before masks are laid over it. What follows takes it
// to base 2 as it would take x, only that the scale of that side is c log2 e. A side without a
// bound, of tanh_scale 0, keeps its x and its scale, and with them its bits. The derivative,
// 1 - tanh^2, is a factor of the logit gradient.
#pragma once
#include "base.cuh"
#include "params.cuh"
#include "row_statistics.cuh"

// Up to here tanh is a polynomial, which keeps the relative accuracy of small logits: what they
// differ by is all of a small KL.
inline constexpr float kNearZero = 0.6f;

// 1 / x by the special function unit, to the last bit but one.
SKL_HOST_DEVICE float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.f / x;
#endif
}

// tanh(u) for |u| <= kNearZero, to 3e-9.
SKL_HOST_DEVICE float tanh_near_zero(float u) {
    const float square = u * u;
    float p = fma(square, -5.895157810300589e-3f, 2.0795971155166626e-2f);
    p = fma(square, p, -5.378383025527e-2f);
    p = fma(square, p, 1.3331924378871918e-1f);
    p = fma(square, p, -3.3333298563957214e-1f);
    return fma(u * square, p, u);
}

struct CappedLogit {
    float value, slope;  // tanh and its derivative; x and 1 without a bound
};

// What a piece of code knows of the logits it is for.
enum class Bound {
    kNone,  // that their side has no bound
    kNear,  // that all of a warp's lie near zero
    kAny,   // nothing
};

// An infinite x, which comes of infinite or overflown inputs, becomes NaN as its row does without a
// bound.
template <Bound kBound>
SKL_HOST_DEVICE CappedLogit capped_logit(float x, float tanh_scale) {
    if (kBound == Bound::kNone) return {x, 1.f};
    const float u = x * tanh_scale;
    const float near = tanh_near_zero(u), slope_near = fma(-near, near, 1.f);
    if (kBound == Bound::kNear) return {near, slope_near};
    // e^(-2 |u|); with it 1 - tanh^2 keeps its digits where tanh has long been 1.
    const float e = fast_exp2(fabs(u) * (-2.f * kLog2E)), r = fast_reciprocal(1.f + e);
    const float far = copysign(fma(-2.f * e, r, 1.f), u);
    const bool is_near = fabs(u) <= kNearZero;
    return {fma(x, 0.f, is_near ? near : far), is_near ? slope_near : 4.f * e * (r * r)};
}

// The gradient with respect to the scaled product of side kSide, given its logit and that of the
// other side. Row is RowStatistics or WeightedStatistics.
template <int kSide, bool kHasSoftcap, class Row>
SKL_HOST_DEVICE float product_gradient(const CappedLogit& trained, float fixed, const Row& row,
                                       const BackwardParams& params) {
    const float x1 = kSide == 1 ? trained.value : fixed, x2 = kSide == 1 ? fixed : trained.value;
    float gradient;
    if constexpr (is_same<Row, WeightedStatistics>) {
        gradient = weighted_gradient<kSide>(x1, x2, row, params.scale1, params.scale2);
    } else {
        gradient = logit_gradient<kSide>(x1, x2, row, params.scale1, params.scale2);
    }
    return kHasSoftcap ? gradient * trained.slope : gradient;
}

#if defined(__CUDACC__)
template <Bound kBound, bool kLinesFirst, int kLines, int kElements, class Take>
SKL_DEVICE void take_columns(const float (&s)[kLines][kElements], int begin, int end,
                             float tanh_scale, const Take& take) {
    if constexpr (kLinesFirst) {
        SKL_UNROLL
        for (int line = 0; line < kLines; ++line) {
            SKL_UNROLL
            for (int e = begin; e < end; ++e)
                take(line, e, capped_logit<kBound>(s[line][e], tanh_scale));
        }
    } else {
        SKL_UNROLL
        for (int e = begin; e < end; ++e) {
            SKL_UNROLL
            for (int line = 0; line < kLines; ++line)
                take(line, e, capped_logit<kBound>(s[line][e], tanh_scale));
        }
    }
}

// Calls take(line, e, logit) for all products of a tile: a few columns at a time where the side may
// have a bound, by code for those near zero, which needs no special functions, or for any. In
// larger portions ptxas keeps more of the arithmetic under way than there are registers for.
template <bool kHasSoftcap, bool kLinesFirst, int kLines, int kElements, class Take>
SKL_DEVICE void take_logits(const float (&s)[kLines][kElements], float tanh_scale,
                            const Take& take) {
    if (!kHasSoftcap || tanh_scale == 0.f) {
        take_columns<Bound::kNone, kLinesFirst>(s, 0, kElements, tanh_scale, take);
    } else {
        constexpr int kCols = 4;
        SKL_UNROLL
        for (int begin = 0; begin < kElements; begin += kCols) {
            bool is_near = true;
            SKL_UNROLL
            for (int line = 0; line < kLines; ++line) {
                SKL_UNROLL
                for (int e = begin; e < begin + kCols; ++e) {
                    is_near &= fabsf(s[line][e] * tanh_scale) <= kNearZero;
                }
            }
            if (__all_sync(~0u, is_near)) {
                take_columns<Bound::kNear, kLinesFirst>(s, begin, begin + kCols, tanh_scale, take);
            } else {
                take_columns<Bound::kAny, kLinesFirst>(s, begin, begin + kCols, tanh_scale, take);
            }
        }
    }
}

// The logits of a tile, in place.
template <int kLines, int kElements>
SKL_DEVICE void cap_scores(float (&s)[kLines][kElements], float tanh_scale) {
    if (tanh_scale == 0.f) return;
    take_logits<true, false>(s, tanh_scale, [&](int line, int e, const CappedLogit& logit) {
        s[line][e] = logit.value;
    });
}

// Calls take(line, e, logit) for all products of side kSide, trained, of a tile, after those of the
// other side have got their bound: columns first, or lines.
template <int kSide, bool kHasSoftcap, bool kLinesFirst, int kLines, int kElements, class Take>
SKL_DEVICE void take_trained(float (&fixed)[kLines][kElements],
                             const float (&trained)[kLines][kElements],
                             const BackwardParams& params, const Take& take) {
    if constexpr (kHasSoftcap)
        cap_scores(fixed, kSide == 1 ? params.tanh_scale2 : params.tanh_scale1);
    float tanh_scale = kSide == 1 ? params.tanh_scale1 : params.tanh_scale2;
    take_logits<kHasSoftcap, kLinesFirst>(trained, tanh_scale, take);
}
#endif
