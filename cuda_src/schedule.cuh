// Who visits what: the key tiles of a split, and the query tiles of a block of keys. Plain
// arithmetic that also compiles for the host, where a test counts that every pair is visited once.
#pragma once
#include "base.cuh"
#include "key_range.cuh"
#include "params.cuh"

// What a block of the forward works on. head_idx is the first head of a pack.
struct ForwardBlock {
    int split_idx, batch_idx, head_idx, first_query;
};

// Splits of a tile of queries are neighbours, then come the tiles of a head or pack of heads, the
// last and (with a causal mask) heaviest first.
SKL_HOST_DEVICE ForwardBlock forward_block(const ForwardParams& params, int block_idx) {
    const int tile_idx = block_idx / params.num_splits;
    const int pack_of_batch = tile_idx / params.num_query_tiles;
    const int query_tile = params.num_query_tiles - 1 - tile_idx % params.num_query_tiles;
    const int packs_per_batch = params.num_heads / params.heads_per_tile;
    return {block_idx % params.num_splits, pack_of_batch / packs_per_batch,
            pack_of_batch % packs_per_batch * params.heads_per_tile,
            query_tile * params.queries_per_tile};
}

// Whose the rows of a tile of the forward are, from one of its rows on. Few queries of heads that
// share their keys are packed into one tile, so that the keys are read once: the heads of a query
// are then neighbours. Rows beyond the last whole query of a pack belong to nobody.
template <bool kIsPacked>
struct TileRows;

template <>
struct TileRows<false> {
    int first_query, head_idx;

    SKL_HOST_DEVICE TileRows(const ForwardParams&, const ForwardBlock& block, int first_row)
        : first_query(block.first_query + first_row), head_idx(block.head_idx) {}

    SKL_HOST_DEVICE TileRows after(int num_rows) const {
        TileRows later = *this;
        later.first_query += num_rows;
        return later;
    }
    SKL_HOST_DEVICE int query(int row) const { return first_query + row; }
    SKL_HOST_DEVICE int head(int) const { return head_idx; }
    SKL_HOST_DEVICE bool exists(int row, int num_queries) const { return query(row) < num_queries; }
};

template <>
struct TileRows<true> {
    int first_query, first_head, heads_per_tile, num_rows, first_row;

    SKL_HOST_DEVICE TileRows(const ForwardParams& params, const ForwardBlock& block, int first_row)
        : first_query(block.first_query),
          first_head(block.head_idx),
          heads_per_tile(params.heads_per_tile),
          num_rows(params.heads_per_tile * params.queries_per_tile),
          first_row(first_row) {}

    SKL_HOST_DEVICE TileRows after(int num_rows) const {
        TileRows later = *this;
        later.first_row += num_rows;
        return later;
    }
    SKL_HOST_DEVICE int query(int row) const {
        return first_query + (first_row + row) / heads_per_tile;
    }
    SKL_HOST_DEVICE int head(int row) const {
        return first_head + (first_row + row) % heads_per_tile;
    }
    SKL_HOST_DEVICE bool exists(int row, int num_queries) const {
        return first_row + row < num_rows && query(row) < num_queries;
    }
};

// The first key tile of a split and the first one behind its last.
struct TileRange {
    int begin, end;
};

// Where the tiles of a block begin, counted from multiples of their size: those of a ragged batch
// at the first key of a sequence, so that the other sequence there costs nothing.
template <int kBlockK, class Range>
SKL_HOST_DEVICE int origin_of(const Range& range, int first_query) {
    if constexpr (Range::kIsRagged) return range.begin(first_query) % kBlockK;
    return 0;
}

// The tiles that hold any of the keys that the queries [first, last] see; none where there are
// none.
template <int kBlockK, class Range>
SKL_HOST_DEVICE TileRange tiles_of(const Range& range, int first, int last) {
    const Interval keys = range.any_of(first, last);
    const int begin = keys.begin / kBlockK;
    const bool is_empty = Range::kIsWindowed && keys.begin >= keys.end;
    const int end = keys.end - origin_of<kBlockK>(range, first);
    return {begin, is_empty ? begin : ceil_div(end, kBlockK)};
}

template <int kBlockK, class Range>
SKL_HOST_DEVICE TileRange tiles_of_split(const Range& range, int first_query, int num_queries,
                                         int split_idx, int num_splits) {
    const auto [begin, end] = tiles_of<kBlockK>(range, first_query, first_query + num_queries - 1);
    const int num_tiles = max_of(0, end - begin), share = num_tiles / num_splits,
              rest = num_tiles % num_splits;
    const int first = begin + split_idx * share + min_of(split_idx, rest);
    return {first, first + share + (split_idx < rest)};
}

struct QueryTile {
    int head_idx, first_query;
};

// The batch entry of a block of keys.
template <int kSide>
SKL_HOST_DEVICE int batch_of_keys(const BackwardParams& params, uint32 block_idx) {
    return block_idx / params.num_blocks /
           (params.num_heads / (kSide == 1 ? params.group1 : params.group2));
}

// The queries of a block of keys: one key head of side kSide, its group of query heads, kBlockRows
// keys.
template <int kSide, int kBlockRows, int kBlockQ>
struct QueryWalk {
    int batch_idx, key_head_idx, first_key;
    int head_begin, head_end;    // query heads of the group
    int query_begin, query_end;  // the queries that see any of the keys, from the start of a tile

    template <class Range>
    SKL_HOST_DEVICE void start(const BackwardParams& params, const Range& range, uint32 block_idx) {
        start(params, range, block_idx / params.num_blocks, block_idx % params.num_blocks);
    }
    template <class Range>
    SKL_HOST_DEVICE void start(const BackwardParams& params, const Range& range,
                               int key_head_of_batch, int block_of_head) {
        const int group = kSide == 1 ? params.group1 : params.group2;
        const int num_key_heads = params.num_heads / group;
        batch_idx = key_head_of_batch / num_key_heads;
        key_head_idx = key_head_of_batch % num_key_heads;
        first_key = block_of_head * kBlockRows;
        const Interval queries = range.queries_of(first_key, first_key + kBlockRows - 1);
        // Tiles of a ragged batch begin at any tile of the scratch of dQ.
        constexpr int kStep = Range::kIsRagged ? 16 : kBlockQ;
        query_begin = queries.begin / kStep * kStep;
        query_end = queries.end;
        head_begin = key_head_idx * group;
        head_end = queries.begin < queries.end ? head_begin + group : head_begin;
    }

    // Tile after tile of a head, head after head of the group.
    SKL_HOST_DEVICE QueryTile first_tile() const { return {head_begin, query_begin}; }
    SKL_HOST_DEVICE bool is_past(QueryTile tile) const { return tile.head_idx >= head_end; }
    SKL_HOST_DEVICE QueryTile next(QueryTile tile) const {
        tile.first_query += kBlockQ;
        return tile.first_query < query_end ? tile : QueryTile{tile.head_idx + 1, query_begin};
    }

    // Heads of the group may differ in the key head of the other side.
    SKL_HOST_DEVICE bool exchanges_keys(const BackwardParams& params, QueryTile tile) const {
        const int other_group = kSide == 1 ? params.group2 : params.group1;
        return tile.first_query == query_begin && tile.head_idx > head_begin &&
               tile.head_idx % other_group == 0;
    }
};

// The same walk, round and round, for blocks that add to the same rows of dQ. Heads whose keys of
// both sides are the same form a run.
template <int kSide, int kBlockRows, int kBlockQ>
struct RunWalk : QueryWalk<kSide, kBlockRows, kBlockQ> {
    using Walk = QueryWalk<kSide, kBlockRows, kBlockQ>;
    using Walk::head_begin, Walk::head_end, Walk::query_begin, Walk::query_end;
    int num_tiles;  // of a head
    int start_query, heads_per_key;

    template <class Range>
    SKL_HOST_DEVICE void start(const BackwardParams& params, const Range& range,
                               int key_head_of_batch, int block_of_head) {
        Walk::start(params, range, key_head_of_batch, block_of_head);
        num_tiles = ceil_div(query_end - query_begin, kBlockQ);
        heads_per_key = kSide == 1 ? params.group2 : params.group1;  // of the other side
    }
    SKL_HOST_DEVICE int run_of(int head_idx) const {
        return head_idx / heads_per_key - head_begin / heads_per_key;
    }
    SKL_HOST_DEVICE int end_of_run(int head_idx) const {
        return min_of(head_end, head_idx - head_idx % heads_per_key + heads_per_key);
    }
};

// In any order: blocks that run side by side begin at tiles of their own.
template <int kSide, int kBlockRows, int kBlockQ>
struct StaggeredWalk : RunWalk<kSide, kBlockRows, kBlockQ> {
    using Walk = RunWalk<kSide, kBlockRows, kBlockQ>;
    using Walk::num_tiles, Walk::query_begin, Walk::query_end, Walk::start_query;

    template <class Range>
    SKL_HOST_DEVICE void start(const BackwardParams& params, const Range& range, uint32 block_idx) {
        const int64 block_of_head = block_idx % params.num_blocks;
        Walk::start(params, range, block_idx / params.num_blocks, block_of_head);
        start_query =
            query_begin + static_cast<int>(block_of_head * num_tiles / params.num_blocks) * kBlockQ;
    }
    SKL_HOST_DEVICE int next_query(int first_query) const {
        first_query += kBlockQ;
        return first_query < query_end ? first_query : query_begin;
    }
};

// Blocks add to a tile in the order of their launch, so that none waits for one that may not run
// yet. They go from the last tile to the first: with a causal mask the last is that of all blocks.
// num_interleaved key heads alternate in the launch, or all that run would wait for each other.
template <int kSide, int kBlockRows, int kBlockQ>
struct OrderedWalk : RunWalk<kSide, kBlockRows, kBlockQ> {
    using Walk = RunWalk<kSide, kBlockRows, kBlockQ>;
    using Walk::num_tiles, Walk::query_begin, Walk::start_query, Walk::first_key;

    template <class Range>
    SKL_HOST_DEVICE void start(const BackwardParams& params, const Range& range, uint32 block_idx) {
        const uint32 num_heads = static_cast<uint32>(params.num_interleaved);
        const uint32 round = block_idx / num_heads;
        const uint32 first_head = round / params.num_blocks * num_heads;
        Walk::start(params, range, first_head + block_idx % num_heads, round % params.num_blocks);
        start_query = last_tile();
    }
    SKL_HOST_DEVICE int last_tile() const { return query_begin + (num_tiles - 1) * kBlockQ; }
    SKL_HOST_DEVICE int next_query(int first_query) const {
        return first_query > query_begin ? first_query - kBlockQ : last_tile();
    }
    // How many blocks add to a tile before this one.
    template <class Range>
    SKL_HOST_DEVICE int num_before(const Range& range, int first_query) const {
        static_assert(!Range::kIsRagged, "their tiles may overlap");
        return first_key / kBlockRows - range.begin(first_query) / kBlockRows;
    }
};

// Tiles of keys of all heads, one head after the other, dealt out in runs: what a block of
// backward_few_sm90 walks. Key heads are counted through all batches.
template <int kBlockK>
struct KeyRun {
    int tiles_per_head, begin, end;

    SKL_HOST_DEVICE KeyRun(const BackwardParams& params, uint32 block_idx, uint32 num_blocks)
        : tiles_per_head(ceil_div(params.range.num_keys, kBlockK)),
          begin(static_cast<int>(static_cast<int64>(params.num_blocks) * block_idx / num_blocks)),
          end(static_cast<int>(static_cast<int64>(params.num_blocks) * (block_idx + 1) /
                               num_blocks)) {}
    SKL_HOST_DEVICE int key_head_of(int tile) const { return tile / tiles_per_head; }
    SKL_HOST_DEVICE int end_of_head(int key_head) const {
        return min_of(end, (key_head + 1) * tiles_per_head);
    }
    SKL_HOST_DEVICE int first_key(int tile, int key_head) const {
        return (tile - key_head * tiles_per_head) * kBlockK;
    }
};

// The query heads that share a key head of side kSide.
struct HeadsOfKey {
    int batch_idx, key_head_idx, first_head;
};

template <int kSide>
SKL_HOST_DEVICE HeadsOfKey heads_of_key(const BackwardParams& params, int key_head) {
    const int group = kSide == 1 ? params.group1 : params.group2;
    const int num_key_heads = params.num_heads / group;
    const int key_head_idx = key_head % num_key_heads;
    return {key_head / num_key_heads, key_head_idx, key_head_idx * group};
}

// Their queries as the rows of one tile: row r is query r / heads of head r % heads. The rows that
// see a key are an interval as its queries are.
struct RowsOfKey {
    static constexpr bool kIsRagged = false;
    const KeyRange<kPlain>& range;
    int heads, num_keys;

    SKL_HOST_DEVICE RowsOfKey(const KeyRange<kPlain>& range, int heads)
        : range(range), heads(heads), num_keys(range.num_keys) {}
    SKL_HOST_DEVICE int num_rows() const { return range.num_queries * heads; }
    SKL_HOST_DEVICE int query(int row) const { return row / heads; }
    SKL_HOST_DEVICE int head(int row) const { return row % heads; }
    SKL_HOST_DEVICE Interval queries_of(int first, int last) const {
        const Interval queries = range.queries_of(first, last);
        return {queries.begin * heads, queries.end * heads};
    }
    SKL_HOST_DEVICE bool has_empty(int first, int last) const {
        return range.has_empty(query(first), query(last));
    }
};
