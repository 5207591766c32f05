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
    int is_causal;  // whether the last query sees every key, and those before it fewer each
    int begin_lag, end_lag;
};

// Without kIsWindow there is no mask, or a causal one aligned to the bottom right. Kernels are
// compiled for both: what windows and offsets cost in registers would slow down all others, and so
// would other words for the causal mask, which change the machine code of the loops around it.
template <bool kIsWindow>
struct KeyRange : KeyBounds {
    static constexpr bool kIsWindowed = kIsWindow;
    SKL_HOST_DEVICE explicit KeyRange(const KeyBounds& bounds) : KeyBounds(bounds) {}

    SKL_HOST_DEVICE int begin(int query_idx) const {
        return kIsWindow ? clamped(query_idx - begin_lag, num_keys) : 0;
    }
    SKL_HOST_DEVICE int end(int query_idx) const {
        if (kIsWindow) return clamped(query_idx + 1 - end_lag, num_keys);
        if (!is_causal) return num_keys;
        return max_of(0, min_of(num_keys, query_idx + 1 + num_keys - num_queries));
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
        if (kIsWindow && begin(min_of(last, num_queries - 1)) >= num_keys) return true;
        return end(first) <= 0;
    }

    // The queries that see at least one of the keys [first, last], clipped to those that exist.
    SKL_HOST_DEVICE Interval queries_of(int first, int last) const {
        if (kIsWindow) {
            return {clamped(first + end_lag, num_queries),
                    clamped(min_of(last, num_keys - 1) + 1 + begin_lag, num_queries)};
        }
        if (!is_causal) return {0, num_queries};
        return {min_of(num_queries, max_of(0, first - (num_keys - num_queries))), num_queries};
    }

    SKL_HOST_DEVICE static int clamped(int idx, int num) { return max_of(0, min_of(num, idx)); }
};

// The same bounds, where they lie: a copy would cost registers.
template <class Range>
SKL_HOST_DEVICE const Range& range_of(const KeyBounds& bounds) {
    return static_cast<const Range&>(bounds);
}
