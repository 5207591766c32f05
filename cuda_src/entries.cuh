// What of a batch is there: entries of a padded batch, or sequences packed one behind the other.
// Plain arithmetic.
#pragma once
#include "base.cuh"
#include "key_range.cuh"
#include "params.cuh"

// Neighbouring queries and keys, which belong together.
struct Entry {
    int first_query, num_queries, first_key, num_keys;
};

// A position or length that is out of range reads no memory that is not there.
SKL_HOST_DEVICE int value_at(const int* values, int64 idx, int most, int otherwise) {
    return values == nullptr ? otherwise : max_of(0, min_of(most, values[idx]));
}

SKL_HOST_DEVICE Entry padded_entry(const TableParams& params, int64 batch_idx) {
    const int first_key = value_at(params.kv_starts, batch_idx, params.num_keys, 0);
    const int most_keys = params.num_keys - first_key;
    return {0, value_at(params.q_lens, batch_idx, params.num_queries, params.num_queries),
            first_key, value_at(params.kv_lens, batch_idx, most_keys, most_keys)};
}

// The last of the sequences that begin at a position or before it; the first one if none does.
SKL_HOST_DEVICE int sequence_at(const int* begins, int num_sequences, int position) {
    int found = 0, end = num_sequences;  // found begins early enough or is 0, end does not
    while (found + 1 < end) {
        const int middle = found + (end - found) / 2;
        (begins[middle] <= position ? found : end) = middle;
    }
    return found;
}

SKL_HOST_DEVICE Entry packed_entry(const TableParams& params, int sequence) {
    if (params.num_sequences == 0) return {0, 0, 0, 0};
    const auto place = [&](const int* begins, int idx, int most) {
        return value_at(begins, idx, most, 0);
    };
    const int first_query = place(params.cu_seqlens_q, sequence, params.num_queries),
              first_key = place(params.cu_seqlens_k, sequence, params.num_keys);
    return {first_query,
            max_of(0, place(params.cu_seqlens_q, sequence + 1, params.num_queries) - first_query),
            first_key,
            max_of(0, place(params.cu_seqlens_k, sequence + 1, params.num_keys) - first_key)};
}

SKL_HOST_DEVICE int clamped(int64 idx, int num) {
    return static_cast<int>(max_of<int64>(0, min_of<int64>(num, idx)));
}

// How far the place of a query among the keys of its entry is ahead of its index.
SKL_HOST_DEVICE int64 offset_of(const TableParams& params, const Entry& entry) {
    return params.has_offset ? params.q_offset : entry.num_keys - entry.num_queries;
}

// The keys that a query sees. One before the entry or behind it sees none, at the nearest end of
// the entry's keys.
SKL_HOST_DEVICE Interval keys_of_query(const TableParams& params, const Entry& entry, int query) {
    const int idx = query - entry.first_query, num = entry.num_keys;
    if (idx < 0) return {entry.first_key, entry.first_key};
    if (idx >= entry.num_queries) return {entry.first_key + num, entry.first_key + num};
    const int64 place = idx + offset_of(params, entry);
    const int begin = params.left < 0 ? 0 : clamped(place - params.left, num);
    const int end = params.right < 0 ? num : clamped(place + params.right + 1, num);
    return {entry.first_key + begin, entry.first_key + end};
}

// The queries that see a key, likewise.
SKL_HOST_DEVICE Interval queries_of_key(const TableParams& params, const Entry& entry, int key) {
    const int idx = key - entry.first_key, num = entry.num_queries;
    if (idx < 0) return {entry.first_query, entry.first_query};
    if (idx >= entry.num_keys) return {entry.first_query + num, entry.first_query + num};
    const int64 place = idx - offset_of(params, entry);
    const int begin = params.right < 0 ? 0 : clamped(place - params.right, num);
    const int end = params.left < 0 ? num : clamped(place + params.left + 1, num);
    return {entry.first_query + begin, entry.first_query + end};
}

// Row idx of the table: the queries of all batches, then the keys.
SKL_HOST_DEVICE void make_row(const TableParams& params, int64 idx) {
    const int64 num_rows = params.num_batches * params.num_queries;
    const bool is_query = idx < num_rows;
    if (!is_query) idx -= num_rows;
    const int length = is_query ? params.num_queries : params.num_keys;
    const int64 batch_idx = idx / length;
    const int position = static_cast<int>(idx % length);
    const int* begins = is_query ? params.cu_seqlens_q : params.cu_seqlens_k;
    const Entry entry =
        begins == nullptr
            ? padded_entry(params, batch_idx)
            : packed_entry(params, sequence_at(begins, params.num_sequences, position));
    (is_query ? params.of_queries : params.of_keys)[idx] =
        is_query ? keys_of_query(params, entry, position) : queries_of_key(params, entry, position);
}
