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

// Plain: no mask, or a causal one aligned to the bottom right. Window: bounds of any lags. Ragged:
// padded batches and packed sequences, whose bounds lie in a table on the device. Kernels are
// compiled for each: what the others cost in registers would slow down the plain ones, and so would
// other words for the causal mask, which change the machine code of the loops around it.
enum Mask { kPlain, kWindow, kRagged };

template <Mask kMask>
struct KeyRange : KeyBounds {
    static constexpr bool kIsRagged = false;
    static constexpr bool kIsWindowed = kMask == kWindow;  // a query may not see the first key
    SKL_HOST_DEVICE explicit KeyRange(const KeyBounds& bounds) : KeyBounds(bounds) {}

    SKL_HOST_DEVICE int begin(int query_idx) const {
        return kIsWindowed ? clamped(query_idx - begin_lag, num_keys) : 0;
    }
    SKL_HOST_DEVICE int end(int query_idx) const {
        if (kIsWindowed) return clamped(query_idx + 1 - end_lag, num_keys);
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
        if (kIsWindowed && begin(min_of(last, num_queries - 1)) >= num_keys) return true;
        return end(first) <= 0;
    }

    // The queries that see at least one of the keys [first, last], clipped to those that exist.
    SKL_HOST_DEVICE Interval queries_of(int first, int last) const {
        if (kIsWindowed) {
            return {clamped(first + end_lag, num_queries),
                    clamped(min_of(last, num_keys - 1) + 1 + begin_lag, num_queries)};
        }
        if (!is_causal) return {0, num_queries};
        return {min_of(num_queries, max_of(0, first - (num_keys - num_queries))), num_queries};
    }

    SKL_HOST_DEVICE static int clamped(int idx, int num) { return max_of(0, min_of(num, idx)); }
};

// What key_table makes: of each batch entry, for each query the keys that it sees, and for each key
// the queries that see it. Neither end of either ever decreases.
struct KeyTable {
    const Interval *of_queries, *of_keys;  // [batch][num_queries], [batch][num_keys]
};

// Queries that see nothing, be they padding or between two sequences, may lie anywhere.
template <>
struct KeyRange<kRagged> {
    static constexpr bool kIsRagged = true, kIsWindowed = true;
    const KeyTable& table;
    int num_queries, num_keys, batch_idx;

    SKL_HOST_DEVICE KeyRange(const KeyBounds& bounds, const KeyTable& table, int batch_idx)
        : table(table),
          num_queries(bounds.num_queries),
          num_keys(bounds.num_keys),
          batch_idx(batch_idx) {}

    // Beyond the last query as the last one.
    SKL_HOST_DEVICE const Interval& keys_of(int query_idx) const {
        return table.of_queries[static_cast<int64>(batch_idx) * num_queries +
                                min_of(query_idx, num_queries - 1)];
    }
    SKL_HOST_DEVICE int begin(int query_idx) const { return keys_of(query_idx).begin; }
    SKL_HOST_DEVICE int end(int query_idx) const { return keys_of(query_idx).end; }
    SKL_HOST_DEVICE Interval any_of(int first, int last) const { return {begin(first), end(last)}; }
    SKL_HOST_DEVICE Interval all_of(int first, int last) const { return {begin(last), end(first)}; }
    SKL_HOST_DEVICE bool is_empty(int query_idx) const {
        return begin(query_idx) >= end(query_idx);
    }

    SKL_HOST_DEVICE const Interval& queries_of(int key_idx) const {
        return table
            .of_keys[static_cast<int64>(batch_idx) * num_keys + min_of(key_idx, num_keys - 1)];
    }
    SKL_HOST_DEVICE Interval queries_of(int first, int last) const {
        return {queries_of(first).begin, queries_of(last).end};
    }
    // Those that see all of the keys.
    SKL_HOST_DEVICE Interval queries_of_all(int first, int last) const {
        if (last >= num_keys) return {0, 0};
        return {queries_of(last).begin, queries_of(first).end};
    }
};

// The same bounds, where they lie: a copy would cost registers.
template <class Range>
SKL_HOST_DEVICE const Range& range_of(const KeyBounds& bounds) {
    return static_cast<const Range&>(bounds);
}

// What the queries of a batch entry see; params are those of a kernel.
template <Mask kMask, class Params>
SKL_HOST_DEVICE decltype(auto) range_of_entry(const Params& params, int batch_idx) {
    if constexpr (kMask == kRagged) {
        return KeyRange<kRagged>(params.range, params.table, batch_idx);
    } else {
        return range_of<KeyRange<kMask>>(params.range);
    }
}

// The queries that see all of some keys, looked up once for a block of keys past which queries
// stream; nothing where the table is none.
template <class Range>
SKL_HOST_DEVICE Interval queries_of_all(const Range& range, int first_key, int num_keys) {
    if constexpr (Range::kIsRagged) {
        return range.queries_of_all(first_key, first_key + num_keys - 1);
    } else {
        return {};
    }
}
