// The plain arithmetic of cuda_src behind C functions; test_device_arithmetic.py compiles and calls
// it.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "entries.cuh"
#include "finished_rows.cuh"
#include "key_range.cuh"
#include "kl_state.cuh"
#include "params.cuh"
#include "row_statistics.cuh"
#include "schedule.cuh"
#include "smem.cuh"
#include "softcap.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// kl_state.cuh

namespace {

template <int kRows, int kCols>
void update_chunk(const float* x1, const float* x2, float scale1, float scale2, KlState* states) {
    float s1[kRows][kCols], s2[kRows][kCols];
    KlState state[kRows];
    std::memcpy(s1, x1, sizeof(s1));
    std::memcpy(s2, x2, sizeof(s2));
    std::memcpy(state, states, sizeof(state));
    update(state, s1, s2, scale1, scale2);
    std::memcpy(states, state, sizeof(state));
}

}  // namespace

extern "C" void start_states(int num, KlState* states) {
    for (int i = 0; i < num; ++i) states[i] = empty_state();
}

// Threads take their chunks one after the other. x_t [num_threads][num_chunks][num_rows][num_cols],
// states [num_threads][num_rows]. Returns whether there is such an update.
extern "C" int update_states(int num_rows, int num_cols, int num_threads, int num_chunks,
                             const float* x1, const float* x2, float scale1, float scale2,
                             KlState* states) {
    const auto chunk = num_rows == 1 && num_cols == 4    ? update_chunk<1, 4>
                       : num_rows == 2 && num_cols == 8  ? update_chunk<2, 8>
                       : num_rows == 4 && num_cols == 16 ? update_chunk<4, 16>
                                                         : nullptr;
    if (chunk == nullptr) return 0;
    for (int thread = 0; thread < num_threads; ++thread) {
        for (int i = 0; i < num_chunks; ++i) {
            const int64 at = (static_cast<int64>(thread) * num_chunks + i) * num_rows * num_cols;
            chunk(x1 + at, x2 + at, scale1, scale2, states + thread * num_rows);
        }
    }
    return 1;
}

extern "C" void merge_states(int num, const KlState* a, const KlState* b, KlState* merged) {
    for (int i = 0; i < num; ++i) merged[i] = merge(a[i], b[i]);
}

extern "C" void finish_states(int num, const KlState* states, RowResult* results) {
    for (int i = 0; i < num; ++i) results[i] = finish(states[i]);
}

// The entropy of rows by the same steps: each thread's keys, then the threads merged in order.
// x1, x2 [num_threads][num_chunks][kRows][kCols]; entropy [kRows].
extern "C" void entropy_of_rows(int num_threads, int num_chunks, const float* x1, const float* x2,
                                float scale1, float scale2, float* entropy, KlState* plain) {
    constexpr int kRows = 2, kCols = 8;
    EntropyState merged[kRows] = {empty_state<EntropyState>(), empty_state<EntropyState>()};
    for (int thread = 0; thread < num_threads; ++thread) {
        EntropyState state[kRows] = {empty_state<EntropyState>(), empty_state<EntropyState>()};
        for (int i = 0; i < num_chunks; ++i, x1 += kRows * kCols, x2 += kRows * kCols) {
            float s1[kRows][kCols], s2[kRows][kCols];
            std::memcpy(s1, x1, sizeof(s1));
            std::memcpy(s2, x2, sizeof(s2));
            update(state, s1, s2, scale1, scale2);
        }
        for (int row = 0; row < kRows; ++row) merged[row] = merge(merged[row], state[row]);
    }
    for (int row = 0; row < kRows; ++row) {
        entropy[row] = entropy_of(merged[row]);
        plain[row] = merged[row];
    }
}

// Rows of kl, lse1, its low part, lse2, its low part: as the states lie on the card, and folded as
// there.
extern "C" void merge_finished(int num_states, int num, const RowResult* states,
                               RowResult* merged) {
    const auto row_of = [](const RowResult& x) {
        return FinishedRow{x.kl, static_cast<double>(x.lse1.high) + x.lse1.low,
                           static_cast<double>(x.lse2.high) + x.lse2.low};
    };
    for (int i = 0; i < num; ++i) {
        FinishedRow whole = row_of(states[i]);
        for (int j = 1; j < num_states; ++j) whole = merge(whole, row_of(states[j * num + i]));
        merged[i] = {static_cast<float>(whole.kl), split(whole.lse1), split(whole.lse2)};
    }
}

// Rows as above, with given log-sum-exps, and what replace_lse makes of them: with a last column,
// mass1.
extern "C" void divide_finished(int num, const RowResult* rows, const float* given1,
                                const float* given2, float scale1_error, float scale2_error,
                                RowResult* results, float* mass1) {
    for (int i = 0; i < num; ++i) {
        const FinishedRow own = {rows[i].kl,
                                 static_cast<double>(rows[i].lse1.high) + rows[i].lse1.low,
                                 static_cast<double>(rows[i].lse2.high) + rows[i].lse2.low};
        const bool is_given1 = given1 != nullptr, is_given2 = given2 != nullptr;
        const GivenRow row =
            divide_by(own, is_given1 ? with_error_of_scale(given1[i], scale1_error) : own.lse1,
                      is_given2 ? with_error_of_scale(given2[i], scale2_error) : own.lse2);
        results[i] = {static_cast<float>(row.kl),
                      is_given1 ? split(row.lse1, given1[i]) : split(row.lse1),
                      is_given2 ? split(row.lse2, given2[i]) : split(row.lse2)};
        mass1[i] = static_cast<float>(row.mass1);
    }
}

namespace {

template <int kSide>
void gradients_of(int num_rows, int num_keys, const float* x1, const float* x2, float scale1,
                  float scale2, const RowResult* rows, const float* mass1, bool is_given1,
                  bool is_given2, float* plain, float* weighted_ones) {
    for (int i = 0; i < num_rows; ++i) {
        const Log2Sum sum1 = to_log2(rows[i].lse1.high, rows[i].lse1.low),
                      sum2 = to_log2(rows[i].lse2.high, rows[i].lse2.low);
        const RowStatistics row =
            given_statistics<kSide>(sum1, sum2, rows[i].kl, mass1[i], is_given1, is_given2);
        const WeightedStatistics with_dkl = weighted<kSide>(row, mass1[i]);
        for (int64 at = int64{i} * num_keys; at < int64{i + 1} * num_keys; ++at) {
            plain[at] = mass1[i] * gradient_unit<kSide> *
                        logit_gradient<kSide>(x1[at], x2[at], row, scale1, scale2);
            weighted_ones[at] = weighted_gradient<kSide>(x1[at], x2[at], with_dkl, scale1, scale2);
        }
    }
}

}  // namespace

// Logit gradients [num_rows][num_keys] of one side, with given log-sum-exps and dkl = 1: as the
// portable kernels compute them, and as Hopper's do.
extern "C" void given_gradients(int side, int num_rows, int num_keys, const float* x1,
                                const float* x2, float scale1, float scale2, const RowResult* rows,
                                const float* mass1, int is_given1, int is_given2, float* plain,
                                float* weighted_ones) {
    (side == 1 ? gradients_of<1> : gradients_of<2>)(num_rows, num_keys, x1, x2, scale1, scale2,
                                                    rows, mass1, is_given1, is_given2, plain,
                                                    weighted_ones);
}

// Logit gradients [num_rows][num_keys] of both sides, as the one-pass kernels of Hopper compute
// them, and side 1's as its own kernels do.
extern "C" void gradients_of_both(int num_rows, int num_keys, const float* x1, const float* x2,
                                  float scale1, float scale2, const RowResult* rows,
                                  const float* dkl, float* ds1, float* ds2, float* alone1) {
    for (int i = 0; i < num_rows; ++i) {
        const Log2Sum sum1 = to_log2(rows[i].lse1.high, rows[i].lse1.low),
                      sum2 = to_log2(rows[i].lse2.high, rows[i].lse2.low);
        const auto row1 =
            weighted<1>(given_statistics<1>(sum1, sum2, rows[i].kl, 1.f, false, false), dkl[i]);
        const auto row2 =
            weighted<2>(given_statistics<2>(sum1, sum2, rows[i].kl, 1.f, false, false), dkl[i]);
        for (int64 at = int64{i} * num_keys; at < int64{i + 1} * num_keys; ++at) {
            const PairOfGradients ds =
                weighted_gradients(x1[at], x2[at], row1, row2.weight, scale1, scale2);
            ds1[at] = ds.side1;
            ds2[at] = ds.side2;
            alone1[at] = weighted_gradient<1>(x1[at], x2[at], row1, scale1, scale2);
        }
    }
}

extern "C" void nats_of(int num, const float* exponent, const float* log2_sum, FloatPair* nats) {
    for (int i = 0; i < num; ++i) nats[i] = to_nats(exponent[i], log2_sum[i]);
}

extern "C" void log2_of(int num, const FloatPair* lse, Log2Sum* sums) {
    for (int i = 0; i < num; ++i) sums[i] = to_log2(lse[i].high, lse[i].low);
}

extern "C" void state_constants(float* constants) {
    constants[0] = kUnsetMax;
    constants[1] = kMaskedLogit;
    constants[2] = kRaiseAbove;
}

// ---------------------------------------------------------------------------------------------------------------------
// key_range.cuh

namespace {

// Of a ragged batch of one entry.
std::vector<Interval> intervals_of_queries, intervals_of_keys;
KeyTable table;

// Calls with the key range of the bounds, of the kind that kernels are compiled for.
template <class Call>
auto with_range(const KeyBounds& bounds, int mask, const Call& call) {
    return mask == kRagged   ? call(KeyRange<kRagged>(bounds, table, 0))
           : mask == kWindow ? call(KeyRange<kWindow>(bounds))
                             : call(KeyRange<kPlain>(bounds));
}

}  // namespace

// Logits with a bound, and their slopes, by the code for those near zero or for any.
extern "C" void cap_logits(int num, const float* x, float tanh_scale, int are_near, float* values,
                           float* slopes) {
    for (int i = 0; i < num; ++i) {
        const CappedLogit logit = are_near ? capped_logit<Bound::kNear>(x[i], tanh_scale)
                                           : capped_logit<Bound::kAny>(x[i], tanh_scale);
        values[i] = logit.value;
        slopes[i] = logit.slope;
    }
}

// Gradients with respect to the products of a row with its keys, of which side `side` has a bound.
extern "C" void product_gradients(int side, int num, const float* x1, const float* x2,
                                  float tanh_scale, const BackwardParams* params,
                                  const RowStatistics* row, float dkl, float* ds,
                                  float* weighted_ds) {
    for (int i = 0; i < num; ++i) {
        if (side == 1) {
            const CappedLogit logit = capped_logit<Bound::kAny>(x1[i], tanh_scale);
            ds[i] = product_gradient<1, true>(logit, x2[i], *row, *params);
            weighted_ds[i] =
                product_gradient<1, true>(logit, x2[i], weighted<1>(*row, dkl), *params);
        } else {
            const CappedLogit logit = capped_logit<Bound::kAny>(x2[i], tanh_scale);
            ds[i] = product_gradient<2, true>(logit, x1[i], *row, *params);
            weighted_ds[i] =
                product_gradient<2, true>(logit, x1[i], weighted<2>(*row, dkl), *params);
        }
    }
}

// Makes the table that ranges are looked up in from now on, and copies it out.
extern "C" void make_table(const TableParams* given, Interval* of_queries, Interval* of_keys) {
    TableParams params = *given;
    intervals_of_queries.resize(params.num_queries);
    intervals_of_keys.resize(params.num_keys);
    params.of_queries = intervals_of_queries.data();
    params.of_keys = intervals_of_keys.data();
    for (int64 idx = 0; idx < static_cast<int64>(params.num_queries) + params.num_keys; ++idx) {
        make_row(params, idx);
    }
    table = {params.of_queries, params.of_keys};
    std::copy(intervals_of_queries.begin(), intervals_of_queries.end(), of_queries);
    std::copy(intervals_of_keys.begin(), intervals_of_keys.end(), of_keys);
}

extern "C" void key_ends(const KeyBounds* bounds, int mask, int num, const int* query,
                         Interval* keys) {
    with_range(*bounds, mask, [&](const auto& range) {
        for (int i = 0; i < num; ++i) keys[i] = {range.begin(query[i]), range.end(query[i])};
    });
}

extern "C" void keys_of_queries(const KeyBounds* bounds, int mask, int num, const int* first,
                                const int* last, Interval* any, Interval* all, Interval* empty) {
    with_range(*bounds, mask, [&](const auto& range) {
        for (int i = 0; i < num; ++i) {
            any[i] = range.any_of(first[i], last[i]);
            all[i] = range.all_of(first[i], last[i]);
            if constexpr (std::decay_t<decltype(range)>::kIsRagged) {
                empty[i] = {0, 0};
                for (int query = first[i]; query <= last[i]; ++query) {
                    empty[i].begin |= range.is_empty(query);
                }
            } else {
                empty[i] = {range.has_empty(first[i], last[i]), 0};
            }
        }
    });
}

extern "C" void queries_of_keys(const KeyBounds* bounds, int mask, int num, const int* first,
                                const int* last, Interval* queries) {
    with_range(*bounds, mask, [&](const auto& range) {
        for (int i = 0; i < num; ++i) queries[i] = range.queries_of(first[i], last[i]);
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// schedule.cuh. The loops are those of the kernels; what they compute with is compiled from the
// headers.

namespace {

struct Block {
    int row_tiles, num_warps_q, num_warps_k, chunk;
};

struct Visits {
    int num_queries, num_keys;
    int* counts;  // [queries][keys]
    int num_wrong = 0;

    // A query and a key meet without a mask between them.
    void add(int query, int key) {
        if (query < num_queries && key < num_keys) {
            ++counts[static_cast<int64>(query) * num_keys + key];
        } else {
            ++num_wrong;
        }
    }
};

template <int kBlockQ_, int kBlockK_>
struct Tiles {
    static constexpr int kBlockQ = kBlockQ_, kBlockK = kBlockK_;
};

// A split of a block of forward_sm80, and, with one split and one warp a row, of backward_dq_sm80.
template <class Traits, class Range>
void visit_tile(Visits& visits, const Range& range, const Block& block, int first_query,
                int split_idx, int num_splits) {
    const int rows_per_warp = 16 * block.row_tiles,
              keys_per_warp = Traits::kBlockK / block.num_warps_k;
    const TileRange tiles =
        tiles_of_split<Traits::kBlockK>(range, first_query, Traits::kBlockQ, split_idx, num_splits);
    const int origin = origin_of<Traits::kBlockK>(range, first_query);
    for (int warp = 0; warp < block.num_warps_q * block.num_warps_k; ++warp) {
        const int first_row = first_query + warp % block.num_warps_q * rows_per_warp;
        const int warp_k = warp / block.num_warps_q;
        const Interval any = range.any_of(first_row, first_row + rows_per_warp - 1);
        const Interval all = range.all_of(first_row, first_row + rows_per_warp - 1);
        for (int tile = tiles.begin; tile < tiles.end; ++tile) {
            for (int chunk = 0; chunk < keys_per_warp; chunk += block.chunk) {
                const int first_key =
                    tile * Traits::kBlockK + origin + warp_k * keys_per_warp + chunk;
                if (first_row >= range.num_queries || first_key >= any.end ||
                    first_key + block.chunk <= any.begin)
                    continue;
                const bool is_border = first_key < all.begin || first_key + block.chunk > all.end;
                for (int query = first_row;
                     query < min_of(first_row + rows_per_warp, range.num_queries); ++query) {
                    for (int key = first_key; key < first_key + block.chunk; ++key) {
                        if (!is_border || (key >= range.begin(query) && key < range.end(query)))
                            visits.add(query, key);
                    }
                }
            }
        }
    }
}

template <class Traits, class Range>
int visit_queries(const Range& range, const Block& block, int num_splits, int* counts) {
    Visits visits{range.num_queries, range.num_keys, counts};
    for (int first_query = 0; first_query < range.num_queries; first_query += Traits::kBlockQ) {
        int expected_begin = -1;
        for (int split_idx = 0; split_idx < num_splits; ++split_idx) {
            const TileRange tiles = tiles_of_split<Traits::kBlockK>(
                range, first_query, Traits::kBlockQ, split_idx, num_splits);
            // Splits follow on each other, the first ones one tile longer at most.
            if (split_idx > 0 && tiles.begin != expected_begin) ++visits.num_wrong;
            expected_begin = tiles.end;
            visit_tile<Traits>(visits, range, block, first_query, split_idx, num_splits);
        }
    }
    return visits.num_wrong;
}

// What the warps of a key-stationary block do with a tile of queries.
template <int kBlockRows, int kBlockQ, class Range>
void visit_keys_of_tile(Visits& visits, const Range& range, int first_key_of_block, int first_query,
                        int rows_per_warp, int chunk_q) {
    for (int row = 0; row < kBlockRows; row += rows_per_warp) {
        const int first_key = first_key_of_block + row;
        for (int chunk = 0; chunk < kBlockQ; chunk += chunk_q) {
            const int first = first_query + chunk, last = first + chunk_q - 1;
            const Interval any = range.any_of(first, last), all = range.all_of(first, last);
            if (first >= range.num_queries || first_key >= any.end ||
                first_key + rows_per_warp <= any.begin)
                continue;
            const bool is_border = first_key < all.begin || first_key + rows_per_warp > all.end ||
                                   last >= range.num_queries;
            for (int query = first; query <= last; ++query) {
                const int end = query < range.num_queries ? range.end(query) : 0;
                for (int key = first_key; key < first_key + rows_per_warp; ++key) {
                    if (!is_border || (key >= range.begin(query) && key < end))
                        visits.add(query, key);
                }
            }
        }
    }
}

template <int kSide, int kBlockRows, int kBlockQ, class Range>
int visit_keys(const BackwardParams& params, const Range& range, int num_batches, int rows_per_warp,
               int chunk_q, int* counts) {
    const int group = kSide == 1 ? params.group1 : params.group2;
    const int other_group = kSide == 1 ? params.group2 : params.group1;
    int num_wrong = 0;
    const int num_blocks = num_batches * (params.num_heads / group) * params.num_blocks;
    for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
        QueryWalk<kSide, kBlockRows, kBlockQ> walk;
        walk.start(params, range, block_idx);
        int other_head = walk.head_begin / other_group;  // whose keys lie in shared memory
        for (QueryTile tile = walk.first_tile(); !walk.is_past(tile); tile = walk.next(tile)) {
            if (walk.exchanges_keys(params, tile)) other_head = tile.head_idx / other_group;
            if (other_head != tile.head_idx / other_group ||
                tile.head_idx / group != walk.key_head_idx)
                ++num_wrong;
            // The scratch of the fused kernel is made of whole tiles of queries.
            if (tile.first_query % 16 != 0) ++num_wrong;
            const int64 head =
                static_cast<int64>(walk.batch_idx) * params.num_heads + tile.head_idx;
            Visits visits{range.num_queries, range.num_keys,
                          counts + head * range.num_queries * range.num_keys};
            visit_keys_of_tile<kBlockRows, kBlockQ>(visits, range, walk.first_key, tile.first_query,
                                                    rows_per_warp, chunk_q);
            num_wrong += visits.num_wrong;
        }
    }
    return num_wrong;
}

// The blocks of backward_fused_sm90, run after run of heads that share the keys of both sides. If
// they are ordered, as many have to have been at a tile before as a block waits for.
template <int kSide, bool kIsOrdered, class Range>
int visit_keys_in_rounds(const BackwardParams& params, const Range& range, int num_batches,
                         int* counts) {
    constexpr int kBlockRows = 128, kBlockQ = 64;
    using Walk = typename Choose<kIsOrdered, OrderedWalk<kSide, kBlockRows, kBlockQ>,
                                 StaggeredWalk<kSide, kBlockRows, kBlockQ>>::Type;
    const int tiles_per_head = ceil_div(range.num_queries, kBlockQ);
    std::vector<int> num_added(static_cast<size_t>(num_batches) * params.num_heads *
                               tiles_per_head);
    const int group = kSide == 1 ? params.group1 : params.group2;
    const int other_group = kSide == 1 ? params.group2 : params.group1;
    int num_wrong = 0;
    const int num_blocks = num_batches * (params.num_heads / group) * params.num_blocks;
    for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
        Walk walk;
        walk.start(params, range, block_idx);
        int num_runs = 0;
        for (int head_idx = walk.head_begin; head_idx < walk.head_end;
             head_idx = walk.end_of_run(head_idx)) {
            if (walk.run_of(head_idx) != num_runs++) ++num_wrong;
            const int end_of_run = walk.end_of_run(head_idx);
            int first_query = walk.start_query;
            for (int i = 0; i < (end_of_run - head_idx) * walk.num_tiles; ++i) {
                const int head = head_idx + i / walk.num_tiles;
                if (head / other_group != head_idx / other_group ||
                    head / group != walk.key_head_idx || first_query % 16 != 0 ||
                    (i % walk.num_tiles == 0 && first_query != walk.start_query))
                    ++num_wrong;
                const int64 head_of_batch =
                    static_cast<int64>(walk.batch_idx) * params.num_heads + head;
                Visits visits{range.num_queries, range.num_keys,
                              counts + head_of_batch * range.num_queries * range.num_keys};
                visit_keys_of_tile<kBlockRows, kBlockQ>(visits, range, walk.first_key, first_query,
                                                        64, kBlockQ);
                num_wrong += visits.num_wrong;
                if constexpr (kIsOrdered) {
                    int& added = num_added[head_of_batch * tiles_per_head + first_query / kBlockQ];
                    if (walk.num_before(range, first_query) != added++) ++num_wrong;
                }
                first_query = walk.next_query(first_query);
            }
        }
    }
    return num_wrong;
}

// The blocks of backward_few_sm90, all together.
template <int kSide>
int visit_keys_in_runs(const BackwardParams& params, int num_blocks, int* counts) {
    constexpr int kBlockK = 64;
    const auto& range = range_of<KeyRange<kPlain>>(params.range);
    const int group = kSide == 1 ? params.group1 : params.group2;
    const RowsOfKey rows(range, group);
    int num_wrong = 0, next_tile = 0;
    for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
        const KeyRun<kBlockK> run(params, block_idx, num_blocks);
        if (run.begin != next_tile || run.end < run.begin) ++num_wrong;
        next_tile = run.end;
        for (int tile = run.begin; tile < run.end;) {
            const int key_head = run.key_head_of(tile), end = run.end_of_head(key_head);
            const HeadsOfKey heads = heads_of_key<kSide>(params, key_head);
            if (end <= tile || heads.first_head / group != heads.key_head_idx) ++num_wrong;
            for (; tile < end; ++tile) {
                for (int i = 0; i < kBlockK; ++i) {
                    const int key = run.first_key(tile, key_head) + i;
                    if (key >= range.num_keys) continue;
                    const Interval visible = rows.queries_of(key, key);
                    for (int row = visible.begin; row < visible.end; ++row) {
                        if (row >= rows.num_rows()) {
                            ++num_wrong;
                            continue;
                        }
                        const int64 head = static_cast<int64>(heads.batch_idx) * params.num_heads +
                                           heads.first_head + rows.head(row);
                        ++counts[(head * range.num_queries + rows.query(row)) * range.num_keys +
                                 key];
                    }
                }
            }
        }
    }
    return num_wrong + (next_tile != params.num_blocks);
}

}  // namespace

// Counts how often each pair of a query and a key meets; counts [queries][keys] start at zero.
// Returns how often a query met a key that does not exist, or splits did not follow on each other;
// -1 if there is no such tile.
extern "C" int count_forward(const KeyBounds* bounds, int mask, int block_q, int block_k,
                             int row_tiles, int num_warps_k, int chunk, int num_splits,
                             int* counts) {
    const Block block{row_tiles, block_q / (16 * row_tiles), num_warps_k, chunk};
    return with_range(*bounds, mask, [&](const auto& range) {
        using Range = std::decay_t<decltype(range)>;
        const auto visit = block_q == 16 && block_k == 32    ? visit_queries<Tiles<16, 32>, Range>
                           : block_q == 16 && block_k == 128 ? visit_queries<Tiles<16, 128>, Range>
                           : block_q == 64 && block_k == 16  ? visit_queries<Tiles<64, 16>, Range>
                           : block_q == 64 && block_k == 48  ? visit_queries<Tiles<64, 48>, Range>
                           : block_q == 64 && block_k == 64  ? visit_queries<Tiles<64, 64>, Range>
                           : block_q == 128 && block_k == 32 ? visit_queries<Tiles<128, 32>, Range>
                           : block_q == 128 && block_k == 128
                               ? visit_queries<Tiles<128, 128>, Range>
                               : nullptr;
        return visit == nullptr ? -1 : visit(range, block, num_splits, counts);
    });
}

// Counts how often each row of the forward [batches][heads][queries] belongs to a row of a tile;
// returns how often a row of a tile is of a head or a query that does not exist.
extern "C" int count_rows(int num_batches, int num_heads, int num_queries, int heads_per_tile,
                          int block_q, int num_splits, int* counts) {
    ForwardParams params{};
    params.num_heads = num_heads;
    params.num_splits = num_splits;
    params.heads_per_tile = heads_per_tile;
    params.queries_per_tile = block_q / heads_per_tile;
    params.num_query_tiles = ceil_div(num_queries, params.queries_per_tile);
    int num_wrong = 0;
    const int num_blocks =
        num_batches * (num_heads / heads_per_tile) * params.num_query_tiles * num_splits;
    const auto count = [&](const ForwardBlock& block, const auto& rows, int row) {
        if (!rows.exists(row, num_queries)) return;
        const int head = rows.head(row), query = rows.query(row);
        if (block.batch_idx < num_batches && head < num_heads && query < num_queries) {
            ++counts[((block.batch_idx * num_heads) + head) * num_queries + query];
        } else {
            ++num_wrong;
        }
    };
    for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
        const ForwardBlock block = forward_block(params, block_idx);
        for (int first_row = 0; first_row < block_q; first_row += 16) {
            for (int row = 0; row < 16; ++row) {
                if (heads_per_tile > 1)
                    count(block, TileRows<true>(params, block, first_row), row);
                else
                    count(block, TileRows<false>(params, block, first_row), row);
            }
        }
    }
    return num_wrong;
}

// The same for the key-stationary kernels; counts [batches][heads][queries][keys]. Also counts
// query heads that met the keys of a head that is not theirs.
extern "C" int count_backward(const KeyBounds* bounds, int mask, int side, int num_batches,
                              int num_heads, int group1, int group2, int block_rows, int block_q,
                              int rows_per_warp, int chunk_q, int* counts) {
    BackwardParams params{};
    params.num_heads = num_heads;
    params.group1 = group1;
    params.group2 = group2;
    params.num_blocks = ceil_div(bounds->num_keys, block_rows);
    return with_range(*bounds, mask, [&](const auto& range) {
        using Range = std::decay_t<decltype(range)>;
        const auto visit =
            side == 1 && block_rows == 32 && block_q == 16    ? visit_keys<1, 32, 16, Range>
            : side == 2 && block_rows == 32 && block_q == 16  ? visit_keys<2, 32, 16, Range>
            : side == 1 && block_rows == 64 && block_q == 32  ? visit_keys<1, 64, 32, Range>
            : side == 2 && block_rows == 64 && block_q == 32  ? visit_keys<2, 64, 32, Range>
            : side == 1 && block_rows == 128 && block_q == 48 ? visit_keys<1, 128, 48, Range>
            : side == 2 && block_rows == 128 && block_q == 48 ? visit_keys<2, 128, 48, Range>
                                                              : nullptr;
        return visit == nullptr ? -1
                                : visit(params, range, num_batches, rows_per_warp, chunk_q, counts);
    });
}

// The same for backward_fused_sm90; also counts tiles out of place. Ordered, unless no heads
// alternate.
extern "C" int count_backward_in_rounds(const KeyBounds* bounds, int mask, int side,
                                        int num_batches, int num_heads, int group1, int group2,
                                        int num_interleaved, int* counts) {
    BackwardParams params{};
    params.num_interleaved = num_interleaved;
    params.num_heads = num_heads;
    params.group1 = group1;
    params.group2 = group2;
    params.num_blocks = ceil_div(bounds->num_keys, 128);
    return with_range(*bounds, mask, [&](const auto& range) {
        using Range = std::decay_t<decltype(range)>;
        if (num_interleaved == 0) {
            return side == 1 ? visit_keys_in_rounds<1, false>(params, range, num_batches, counts)
                             : visit_keys_in_rounds<2, false>(params, range, num_batches, counts);
        }
        if constexpr (!Range::kIsRagged) {
            return side == 1 ? visit_keys_in_rounds<1, true>(params, range, num_batches, counts)
                             : visit_keys_in_rounds<2, true>(params, range, num_batches, counts);
        }
        return -1;
    });
}

// The same for backward_few_sm90; also counts tiles that are not the next one.
extern "C" int count_backward_in_runs(const KeyBounds* bounds, int side, int num_batches,
                                      int num_heads, int group1, int group2, int num_blocks,
                                      int* counts) {
    BackwardParams params{};
    params.range = *bounds;
    params.num_heads = num_heads;
    params.group1 = group1;
    params.group2 = group2;
    params.num_blocks =
        ceil_div(bounds->num_keys, 64) * num_batches * (num_heads / (side == 1 ? group1 : group2));
    return side == 1 ? visit_keys_in_runs<1>(params, num_blocks, counts)
                     : visit_keys_in_runs<2>(params, num_blocks, counts);
}

// What a block of keys keeps in static shared memory.
extern "C" int walk_bytes() { return sizeof(QueryWalk<1, 64, 32>); }

// ---------------------------------------------------------------------------------------------------------------------
// smem.cuh

namespace {

template <int kHeadDim>
void offsets_of(int num_rows, int* offsets) {
    using Layout = TileLayout<kHeadDim>;
    for (int row = 0; row < num_rows; ++row) {
        for (int chunk = 0; chunk < Layout::kChunks; ++chunk)
            *offsets++ = Layout::offset_bytes(row, chunk);
    }
}

template <int kHeadDim>
void addresses_of(uint32 tile, int lane_row, int lane_chunk, int num_rows, uint32* addresses) {
    const LaneOffset<kHeadDim> lane(lane_row, lane_chunk);
    for (int row = 0; row < num_rows; row += 8) {
        for (int pair = 0; pair < kHeadDim / 16; ++pair)
            *addresses++ = lane.address(tile, row, pair);
    }
}

}  // namespace

#define FOR_HEAD_DIM(function)    \
    switch (head_dim) {           \
        case 32:                  \
            return function<32>;  \
        case 64:                  \
            return function<64>;  \
        case 96:                  \
            return function<96>;  \
        case 128:                 \
            return function<128>; \
        case 192:                 \
            return function<192>; \
        case 256:                 \
            return function<256>; \
        default:                  \
            return nullptr;       \
    }

namespace {
using Offsets = void (*)(int, int*);
using Addresses = void (*)(uint32, int, int, int, uint32*);
Offsets choose_offsets(int head_dim){FOR_HEAD_DIM(offsets_of)} Addresses
    choose_addresses(int head_dim) {
    FOR_HEAD_DIM(addresses_of)
}
}  // namespace

// offsets [num_rows][head_dim / 8]. Returns whether there is such a layout.
extern "C" int tile_offsets(int head_dim, int num_rows, int* offsets) {
    const Offsets fill = choose_offsets(head_dim);
    if (fill != nullptr) fill(num_rows, offsets);
    return fill != nullptr;
}

// addresses [num_rows / 8][head_dim / 16].
extern "C" int lane_addresses(int head_dim, uint32 tile, int lane_row, int lane_chunk, int num_rows,
                              uint32* addresses) {
    const Addresses fill = choose_addresses(head_dim);
    if (fill != nullptr) fill(tile, lane_row, lane_chunk, num_rows, addresses);
    return fill != nullptr;
}
