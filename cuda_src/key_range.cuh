// Which keys a query may see: an interval [begin, end) whose ends never decrease with the query.
// Every mask is written here and nowhere else. Tiles ask for three things: the union of the
// intervals of their rows (what to visit), their intersection (what needs no mask), and the queries
// that see any of a range of keys.
#pragma once
#include "base.cuh"

struct Interval {
    int begin, end;
};

// Query i sees the keys [i - begin_lag, i - end_lag], both included, as far as they exist. The host
// clamps the lags to [-num_keys, num_queries], which no query tells apart from what lies further
// out.
struct KeyBounds {
    int num_queries, num_keys;
    int is_bounded;  // whether some query does not see the last key
    int begin_lag, end_lag;
};

// Without kHasBegin every query that sees any key sees the first one: no mask, or a causal one.
// Kernels are compiled for both: what a beginning costs in registers would slow down all others.
template <bool kHasBegin>
struct KeyRange : KeyBounds {
    static constexpr bool kHasBeginning = kHasBegin;
    SKL_HOST_DEVICE explicit KeyRange(const KeyBounds& bounds) : KeyBounds(bounds) {}

    SKL_HOST_DEVICE int begin(int query_idx) const {
        return kHasBegin ? clamped(query_idx - begin_lag, num_keys) : 0;
    }
    SKL_HOST_DEVICE int end(int query_idx) const {
        if (!kHasBegin && !is_bounded) return num_keys;
        return clamped(query_idx + 1 - end_lag, num_keys);
    }

    // Of the queries [first, last], clipped to those that exist.
    SKL_HOST_DEVICE Interval any_of(int first, int last) const {
        return {begin(first), end(min_of(last, num_queries - 1))};
    }
    SKL_HOST_DEVICE Interval all_of(int first, int last) const {
        return {begin(min_of(last, num_queries - 1)), end(first)};
    }

    // Whether any of the queries [first, last] sees no key: those that end before the first key are
    // the first ones, those that begin behind the last key the last.
    SKL_HOST_DEVICE bool has_empty(int first, int last) const {
        return end(first) <= 0 || begin(min_of(last, num_queries - 1)) >= num_keys;
    }

    // The queries that see at least one of the keys [first, last], clipped to those that exist.
    SKL_HOST_DEVICE Interval queries_of(int first, int last) const {
        if (!kHasBegin && !is_bounded) return {0, num_queries};
        const int begin = clamped(first + end_lag, num_queries);
        if (!kHasBegin) return {begin, num_queries};
        return {begin, clamped(min_of(last, num_keys - 1) + 1 + begin_lag, num_queries)};
    }

    SKL_HOST_DEVICE static int clamped(int idx, int num) { return max_of(0, min_of(num, idx)); }
};
