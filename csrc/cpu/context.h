// What a context owns: threads, the kernels of one instruction set, and a workspace that grows to
// the greatest call seen and is then reused (no allocation per token).
#pragma once
#include <cstdint>
#include <vector>

#include "attention_amx.h"
#include "bf16.h"
#include "kernels.h"
#include "threads.h"

namespace phloem {

class Buffer {
public:
    Buffer() = default;
    ~Buffer();
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    // At least `bytes`, 64-byte aligned; the content is lost when it grows. Throws std::bad_alloc.
    template <class T> T *get(int64_t count) { return (T *)reserve(count * (int64_t)sizeof(T)); }
    int64_t bytes() const { return bytes_; }
    int64_t grows() const { return grows_; }

private:
    void *reserve(int64_t bytes);
    void *data_ = nullptr;
    int64_t bytes_ = 0, grows_ = 0;
};

struct AttentionItem {
    bool decode;
    TileItem tile;
    DecodeItem part;
    int64_t part_index;  // -1: the item sees the whole context
};

struct AttentionMerge {
    int32_t token, kv_head;
    int64_t first_part, num_parts;
};

}  // namespace phloem

struct phloem_ctx {
    phloem_ctx(int32_t isa_, int num_threads);

    int32_t isa;
    const phloem::Kernels *kernels;
    const phloem::Bf16Kernels *bf16;  // nullptr: bf16 weights are widened
    const phloem::AmxAttention *amx;   // nullptr: there are no tiles
    phloem::ThreadPool pool;
    phloem::Buffer x, xq, scratch, parts, normed, qkv, activation;
    std::vector<phloem::AttentionItem> items;
    std::vector<phloem::AttentionMerge> merges;
};

namespace phloem {

int32_t fail(int32_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));

int32_t check_weight(const phloem_weight &w);
// Whether products with w are of tiles: then run_gemm takes kTiles as x_dtype, and as y_dtype if the
// outputs are a multiple of kBf16Depth.
static inline bool takes_tiles(const phloem_ctx &ctx, const phloem_weight &w) {
    return ctx.bf16 && !ctx.bf16->round && w.format == PHLOEM_W_BF16;
}
// `window` of the layers that the batch is for: what a row reads must lie in its table.
int32_t check_batch(const phloem_kv_layer &kv, const phloem_batch &batch, int32_t window);

// f(first row, end) over m rows, at most `step` at once: to each thread its own, as products of many
// rows cut them. `step` is a multiple of a tile's rows.
template <class F> void over_own_rows(phloem_ctx &ctx, int64_t m, int64_t step, const F &f) {
    constexpr int64_t kUnit = 2 * kTileRows;
    const int64_t threads = ctx.pool.size(), blocks = ceil_div(m, kUnit);
    if (m <= step) return f((int64_t)0, m);
    ctx.pool.run_groups(ceil_div(ceil_div(blocks, threads) * kUnit, step),
                        [&](int64_t group, int64_t i, int) {
                            const int64_t first = blocks * group / threads * kUnit + i * step;
                            int64_t end = blocks * (group + 1) / threads * kUnit;
                            end = end < m ? end : m;
                            if (first < end) f(first, first + step < end ? first + step : end);
                        });
}

// Unchecked bodies, shared by the C calls and the layer.
void run_gemm(phloem_ctx &ctx, const phloem_gemm_args &args);
void run_rmsnorm(phloem_ctx &ctx, const void *x, void *residual, const float *w, void *y,
                 int32_t dtype, int32_t y_dtype, int64_t m, int64_t d, float eps);
void run_rmsnorm_tiles(phloem_ctx &ctx, const void *x, const float *w, uint16_t *y, int32_t dtype,
                       int64_t m, int64_t d, float eps);
void run_rmsnorm_add(phloem_ctx &ctx, const float *x, const float *w, void *y, int32_t y_dtype,
                     int64_t m, int64_t d, float eps);
void run_rope(phloem_ctx &ctx, const phloem_rope_args &args, const phloem_kv_layer &kv,
              const phloem_batch &batch);
void run_attention(phloem_ctx &ctx, const AttentionCall &call);

}  // namespace phloem
