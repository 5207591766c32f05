// Which keys a query may see: an interval [begin, end) whose ends never decrease with the query.
// Every mask is written here and nowhere else. Tiles ask for three things: the union of the
// intervals of their rows (what to visit), their intersection (what needs no mask), and the queries
// that see any of a range of keys.
#pragma once
#include "base.cuh"

struct Interval {
    int begin, end;
};

struct KeyRange {
    int num_queries, num_keys;
    int is_causal;

    // Causal is aligned to the bottom right: the last query sees every key.
    SKL_HOST_DEVICE int end(int query_idx) const {
        if (!is_causal) return num_keys;
        return max_of(0, min_of(num_keys, query_idx + 1 + num_keys - num_queries));
    }
    SKL_HOST_DEVICE int begin(int) const { return 0; }

    // Of the queries [first, last], clipped to those that exist.
    SKL_HOST_DEVICE Interval any_of(int first, int last) const {
        return {begin(first), end(min_of(last, num_queries - 1))};
    }
    SKL_HOST_DEVICE Interval all_of(int first, int last) const {
        return {begin(min_of(last, num_queries - 1)), end(first)};
    }

    // Whether any of the queries [first, last] sees no key.
    SKL_HOST_DEVICE bool has_empty(int first, int) const { return end(first) <= begin(first); }

    // The queries that see at least one of the keys [first, last].
    SKL_HOST_DEVICE Interval queries_of(int first, int) const {
        if (!is_causal) return {0, num_queries};
        return {min_of(num_queries, max_of(0, first - (num_keys - num_queries))), num_queries};
    }
};
