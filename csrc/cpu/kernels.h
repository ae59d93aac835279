// What the per-ISA units offer to the baseline code: one table of functions per instruction set.
// Functions here run on one thread; gemm.cpp, attention.cpp and layer.cpp cut the work.
#pragma once
#include "phloem_cpu.h"

namespace phloem {

// Rows 0..m-1 of x times panels panel0..panel1-1 (with a gate: an even number of them).
struct GemmTask {
    const float *x;
    const phloem_weight *w;
    void *y;
    const void *residual;
    int64_t m, x_stride, y_stride, residual_stride, panel0, panel1;
    int32_t y_dtype, residual_dtype, gate;  // y_dtype also kTiles
    const void *next;  // panels that this thread is likely to be given after these, or null
};

// Sums of up to two panels, tile_panel floats apart, rows of 16, from `row` and `panel` on; and, as
// Kernels::write_sums fills it in, where they go.
struct SumRows {
    const float *sums;
    int64_t tile_panel, row, panel, panels;
    int64_t columns = 0, y_step = 0, residual_step = 0, tile_step = 0;
    const float *bias = nullptr;
    void *y = nullptr;
    const void *residual = nullptr;
};
// Writes the next `count` rows.
using SumWriter = void (*)(SumRows &rows, int64_t count);

// The first page in a row's table; nothing of the row below `read_from` is read, nothing below
// `write_from` is written.
struct RowBounds {
    int64_t base, read_from, write_from;
};
static inline RowBounds row_bounds(const phloem_batch &batch, int64_t row) {
    return {batch.base ? batch.base[row] : 0, batch.read_from ? batch.read_from[row] : 0,
            batch.write_from ? batch.write_from[row] : 0};
}
// The first position that the query at `position` sees.
static inline int64_t first_seen(const RowBounds &row, int32_t window, int64_t position) {
    const int64_t low = window > 0 ? position - window + 1 : 0;
    return low > row.read_from ? low : row.read_from;
}

struct AttentionCall {
    phloem_attention_args args;
    phloem_kv_layer kv;
    phloem_batch batch;
};

// Tokens tok0..tok1-1 of the step, all of one row, against positions t0..t1-1 of one KV head.
struct TileItem {
    int32_t row, kv_head, tok0, tok1;
    int64_t t0, t1;
};

// One token against positions t0..t1-1 of one KV head: o (group, value_dim), ml (group, 2).
struct DecodeItem {
    int32_t row, kv_head, token;
    int64_t t0, t1;
};

struct Kernels {
    void (*to_f32)(const void *x, int32_t dtype, float *y, int64_t n);
    void (*gemm)(const GemmTask &task);
    // Same, of quantised weights (is_blocks); xq from quantize_x, row after row.
    void (*gemm_blocks)(const GemmTask &task, const void *xq);
    // Activations as 16-bit integers per block of 32, for gemm_blocks.
    void (*quantize_x)(const float *x, int64_t k, void *xq);
    // Rows of x as tiles of bf16, see tile_at.
    void (*round_tiles)(const void *x, int32_t dtype, int64_t x_stride, int64_t m, int64_t k,
                        uint16_t *out);
    // What gemm does with its sums, for kernels that compute nothing else.
    SumWriter (*write_sums)(const GemmTask &task, SumRows &rows);
    // y_dtype also kTiles
    void (*rmsnorm)(const void *x, void *residual, const float *w, void *y, int32_t dtype,
                    int32_t y_dtype, int64_t m, int64_t d, float eps);
    // y += norm(x) * w
    void (*rmsnorm_add)(const float *x, const float *w, void *y, int32_t y_dtype, int64_t m,
                        int64_t d, float eps);
    void (*silu_mul)(const void *gate, const void *up, void *y, int32_t dtype, int64_t m,
                     int64_t d, int64_t in_stride);
    // Rows `ids` of w, as they are when multiplied; row: k floats of scratch.
    void (*embedding)(const int32_t *ids, const phloem_weight &w, void *y, int32_t y_dtype,
                      int64_t m, float *row);
    void (*rope)(const phloem_rope_args &args, const phloem_kv_layer &kv,
                 const phloem_batch &batch, int32_t row, int32_t tok0, int32_t tok1);
    void (*latent)(const phloem_latent_args &args, const phloem_kv_layer &kv,
                   const phloem_batch &batch, int32_t row, int32_t tok0, int32_t tok1);
    int64_t (*tile_scratch_floats)(int64_t tokens, int64_t group, const phloem_kv_layer &kv);
    // o and ml null: the whole context is seen, results go to the output.
    void (*attention_tile)(const AttentionCall &call, const TileItem &item, float *o, float *ml,
                           float *scratch);
    int64_t (*decode_scratch_floats)(int64_t group, int64_t head_dim);
    // next: what this thread is likely to be given after it, or null; its first rows are fetched.
    void (*attention_decode)(const AttentionCall &call, const DecodeItem &item,
                             const DecodeItem *next, float *o, float *ml, float *scratch);
    void (*attention_merge)(const AttentionCall &call, int32_t token, int32_t kv_head,
                            int64_t num_parts, const float *o, const float *ml);
    int64_t (*argmax)(const void *x, int32_t dtype, int64_t n);
    void (*top_k)(const void *x, int32_t dtype, int64_t n, int64_t k, float *values,
                  int64_t *indices, float *lse);
    int32_t decode_dim_multiple;  // attention_decode needs parts of rows that this divides
    int32_t rows_per_tile;        // gemm works on this many rows at a time
};

extern const Kernels kKernelsPlain;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;

constexpr int64_t kPanelColumns = 16;
constexpr int64_t kBlockWeights = 32;
constexpr int64_t kBf16Depth = 32;  // of k in one AMX tile; bf16 panels are padded to it
// static: every unit keeps the copy that was compiled with its own flags.
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Activations as tiles: 16 rows by 32 of k, 1 KiB, one after another along k. Where row and k lie.
constexpr int64_t kTileRows = 16, kTileElements = kTileRows * kBf16Depth;
static inline int64_t tile_at(int64_t row, int64_t k, int64_t k_blocks) {
    return (row / kTileRows * k_blocks + k / kBf16Depth) * kTileElements +
           row % kTileRows * kBf16Depth + k % kBf16Depth;
}
static inline int64_t tiles_size(int64_t m, int64_t k) {
    return ceil_div(m, kTileRows) * ceil_div(k, kBf16Depth) * kTileElements;
}
// Inside of the library a dtype, too: bf16 as tiles; the stride is then k.
constexpr int32_t kTiles = 100;
static inline int64_t dtype_bytes(int32_t dtype) { return dtype == PHLOEM_F32 ? 4 : 2; }
static inline bool is_blocks(int32_t format) { return format >= PHLOEM_W_Q8_0; }
// 16 columns by 32 of k, see blocks.inl.
static inline int64_t block_bytes(int32_t format) {
    return format == PHLOEM_W_Q4_0 ? 288 : format == PHLOEM_W_Q4_1 ? 320 : 544;
}
static inline int64_t panel_bytes(int32_t format, int64_t k) {
    if (is_blocks(format)) return ceil_div(k, kBlockWeights) * block_bytes(format);
    if (format == PHLOEM_W_BF16) return ceil_div(k, kBf16Depth) * kBf16Depth * kPanelColumns * 2;
    return ceil_div(k, 2) * 2 * kPanelColumns * 4;
}
// An activation block: 32 int16, then scale, sum and total (4 bytes each).
constexpr int64_t kXqBytes = 76;

}  // namespace phloem
