// What the host passes by value. launch.py holds the same layouts as NumPy dtypes; a test compares
// the two.
#pragma once
#include "base.cuh"
#include "key_range.cuh"

// Strides are in elements; the innermost axis has stride 1.
struct TensorRef {
    const void* data;
    int64 batch_stride, head_stride, row_stride;
};

struct RowsRef {  // kl, lse1, lse2 and their low parts share one set of strides
    int64 batch_stride, head_stride, row_stride;
};

struct ForwardParams {
    TensorRef q1, k1, q2, k2;
    RowsRef rows;
    float *kl, *lse1, *lse2, *lse1_low, *lse2_low;  // all but kl may be null
    float* partials;  // [5 or 6][rows][num_splits], null without splits
    KeyBounds range;
    int num_heads, group1, group2;  // query heads in all, and per key head of each side
    int head_dim1, head_dim2;
    int num_query_tiles, num_splits;  // of a head (or pack of heads), of a tile's keys
    int heads_per_tile, queries_per_tile;
    float scale1, scale2;                // to base 2, never zero
    float masked_logit1, masked_logit2;  // kMaskedLogit before the scale
    int64 num_rows;
    float *entropy, *cross_entropy;  // null unless the kernel has the entropy
    KeyTable table;                  // null unless the mask is ragged
    float tanh_scale1, tanh_scale2;  // of logits with a bound (softcap.cuh), else 0
};

struct PrepareParams {
    RowsRef rows;
    const float *kl, *lse1, *lse2, *lse1_low, *lse2_low;  // low parts may be null
    const float* dkl;
    RowsRef dkl_rows;
    float* row_statistics;  // [rows][4], 16-byte aligned
    uint32* max_dkl;  // bits of the largest finite |dkl|; null unless the element type is fp16
    int num_heads, num_queries;
    int64 num_rows;
    // Of a state with given log-sum-exps; else null.
    const float* mass1;
    float* weighted_dkl;  // dkl mass1, with the strides of rows
    int is_given1, is_given2;
};

struct BackwardParams {
    TensorRef q1, k1, q2, k2;
    const float* dkl;
    RowsRef dkl_rows;
    const float* row_statistics;  // [rows][4]
    const uint32* max_dkl;
    void *dq, *dk;  // of the side that gets gradients
    RowsRef dq_rows, dk_rows;
    float* dq_scratch;  // fused only: [B H][row tiles of 16][head dim / 8][32 lanes][4]
    uint32* dq_counts;  // ordered only: [B H][tiles of 64 queries], the blocks that have added
    KeyBounds range;
    int num_heads, group1, group2;
    int head_dim1, head_dim2;
    int num_blocks;        // blocks of stationary rows per head; few: tiles of keys of all heads
    float scale1, scale2;  // to base 2
    float gradient_scale;  // scale_t of the side that gets gradients
    KeyTable table;        // null unless the mask is ragged
    float tanh_scale1, tanh_scale2;  // as in ForwardParams
    int64 num_interleaved;           // ordered only: key heads that alternate in the launch
};

// Of the kernels that give gradients of both sides; what is no side's own stands in each.
struct BothParams {
    BackwardParams side1, side2;
};

struct FinishParams {
    const float* dq_scratch;
    void* dq;
    RowsRef dq_rows;
    int num_heads, num_queries, head_dim;
    int num_row_tiles;  // of 16 rows, per head or heads that share a tile
    int heads_per_tile;
    float gradient_scale;
};

struct StateRef {
    const float *kl, *lse1, *lse2, *lse1_low, *lse2_low;  // low parts may be null
};

struct ReplaceParams {
    StateRef own;
    float *kl, *lse1, *lse2, *lse1_low, *lse2_low, *mass1;  // all but kl may be null
    RowsRef rows;                                           // of the own values and the results
    const float *given1, *given2;                           // null where the own lse stays
    RowsRef given1_rows, given2_rows;
    float scale1_error, scale2_error;  // relative, of the scales in base 2 of the forward
    int num_heads, num_queries;
    int64 num_rows;
};

struct MergeParams {
    float *kl, *lse1, *lse2, *lse1_low, *lse2_low;  // low parts may be null
    StateRef states[8];
    int64 num_rows;
    int num_states;
};

// Lengths are cut to what there is. Either the first three say what of each batch entry is there,
// each null where all of it is, or the last two where each of the sequences of one entry begins.
struct TableParams {
    Interval *of_queries, *of_keys;  // KeyTable; null where it is not needed
    const int *kv_starts, *kv_lens, *q_lens;
    const int *cu_seqlens_q, *cu_seqlens_k;  // [num_sequences + 1]
    int64 left, right, q_offset;             // as in Problem; -1 without a limit
    int has_offset;                          // else the last query's place is the last key
    int num_queries, num_keys, num_sequences;
    int64 num_batches;
};
