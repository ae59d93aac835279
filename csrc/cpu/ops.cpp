// The C calls of the small operations: check, cut into tasks, run.
#include <algorithm>
#include <cstring>
#include <exception>

#include "codec.h"
#include "context.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace phloem {
namespace {

constexpr int64_t kTaskElements = 32768;  // of pointwise work, about 10 us

bool known_dtype(int32_t dtype) { return dtype == PHLOEM_F32 || dtype == PHLOEM_BF16; }

// f(first row, number of rows) over m rows of `cost` elements each.
template <class F> void over_rows(phloem_ctx &ctx, int64_t m, int64_t cost, const F &f) {
    const int64_t rows = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, cost));
    ctx.pool.run(ceil_div(m, rows),
                 [&](int64_t i, int) { f(i * rows, std::min(rows, m - i * rows)); });
}

// f(row, first token, token after the last one) over a batch whose tokens have `cost` elements each.
template <class F>
void over_tokens(phloem_ctx &ctx, const phloem_batch &batch, int64_t cost, const F &f) {
    const int64_t step = std::max<int64_t>(1, kTaskElements / cost);
    const int32_t *starts = batch.row_start;
    ctx.pool.run(ceil_div(batch.num_tokens, step), [&](int64_t i, int) {
        int32_t token = (int32_t)(i * step);
        const int32_t end = (int32_t)std::min<int64_t>(batch.num_tokens, token + step);
        int32_t row = (int32_t)(std::upper_bound(starts, starts + batch.num_rows, token) - starts);
        for (--row; token < end; ++row) {
            const int32_t stop = std::min(end, starts[row + 1]);
            f(row, token, stop);
            token = stop;
        }
    });
}

template <class T> T *advance(T *p, int64_t elements, int32_t dtype) {
    using Byte = typename std::conditional<std::is_const<T>::value, const char, char>::type;
    return p ? (T *)((Byte *)p + elements * dtype_bytes(dtype)) : p;
}

#if defined(__SSE2__)
// Past the caches: a copied page is not read again soon, and must not push out weights.
void stream_copy(char *dst, const char *src, int64_t bytes) {
    if ((uintptr_t)dst % 16) {
        memcpy(dst, src, bytes);
        return;
    }
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(src + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(src + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(src + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(src + i + 48));
        _mm_stream_si128((__m128i *)(dst + i), a);
        _mm_stream_si128((__m128i *)(dst + i + 16), b);
        _mm_stream_si128((__m128i *)(dst + i + 32), c);
        _mm_stream_si128((__m128i *)(dst + i + 48), d);
    }
    memcpy(dst + i, src + i, bytes - i);
    _mm_sfence();
}
#else
void stream_copy(char *dst, const char *src, int64_t bytes) { memcpy(dst, src, bytes); }
#endif

}  // namespace

void run_rmsnorm(phloem_ctx &ctx, const void *x, void *residual, const float *w, void *y,
                 int32_t dtype, int32_t y_dtype, int64_t m, int64_t d, float eps) {
    over_rows(ctx, m, d, [&](int64_t row, int64_t rows) {
        ctx.kernels->rmsnorm(advance(x, row * d, dtype), advance(residual, row * d, dtype), w,
                             advance(y, row * d, y_dtype), dtype, y_dtype, rows, d, eps);
    });
}

void run_rmsnorm_tiles(phloem_ctx &ctx, const void *x, const float *w, uint16_t *y, int32_t dtype,
                       int64_t m, int64_t d, float eps) {
    const int64_t step = std::max<int64_t>(1, kTaskElements / d / kTileRows) * kTileRows;
    over_own_rows(ctx, m, step, [&](int64_t row, int64_t end) {
        ctx.kernels->rmsnorm(advance(x, row * d, dtype), nullptr, w,
                             y + tile_at(row, 0, ceil_div(d, kBf16Depth)), dtype, kTiles,
                             end - row, d, eps);
    });
}

void run_rmsnorm_add(phloem_ctx &ctx, const float *x, const float *w, void *y, int32_t y_dtype,
                     int64_t m, int64_t d, float eps) {
    over_rows(ctx, m, d, [&](int64_t row, int64_t rows) {
        ctx.kernels->rmsnorm_add(x + row * d, w, advance(y, row * d, y_dtype), y_dtype, rows, d,
                                 eps);
    });
}

static void run_embedding(phloem_ctx &ctx, const int32_t *ids, const phloem_weight &table, void *y,
                          int32_t y_dtype, int64_t m) {
    const int64_t d = table.k, rows = std::max<int64_t>(1, kTaskElements / (8 * d));
    float *scratch = ctx.scratch.get<float>(ctx.pool.size() * d);
    ctx.pool.run(ceil_div(m, rows), [&](int64_t i, int thread) {
        ctx.kernels->embedding(ids + i * rows, table, advance(y, i * rows * d, y_dtype), y_dtype,
                               std::min(rows, m - i * rows), scratch + thread * d);
    });
}

void run_rope(phloem_ctx &ctx, const phloem_rope_args &args, const phloem_kv_layer &kv,
              const phloem_batch &batch) {
    const int64_t cost = (int64_t)(args.num_heads + 2 * kv.num_kv_heads) * kv.head_dim;
    over_tokens(ctx, batch, cost, [&](int32_t row, int32_t tok0, int32_t tok1) {
        ctx.kernels->rope(args, kv, batch, row, tok0, tok1);
    });
}

}  // namespace phloem

using namespace phloem;

extern "C" {

int32_t phloem_gemm(phloem_ctx *ctx, const phloem_gemm_args *args) {
    if (!ctx || !args || !args->w) return fail(PHLOEM_E_ARG, "gemm: null pointer");
    if (int32_t code = check_weight(*args->w)) return code;
    if (args->m == 0) return PHLOEM_OK;
    if (args->gate < PHLOEM_GATE_NONE || args->gate > PHLOEM_GATE_GELU_TANH)
        return fail(PHLOEM_E_ARG, "gemm: unknown gate %d", args->gate);
    const int64_t out = args->gate ? args->w->n / 2 : args->w->n;
    if (!args->x || !args->y || args->m < 0 || args->x_stride < args->w->k ||
        args->y_stride < out || (args->residual && args->residual_stride < out))
        return fail(PHLOEM_E_ARG, "gemm: m %lld, strides %lld, %lld", (long long)args->m,
                    (long long)args->x_stride, (long long)args->y_stride);
    if (!known_dtype(args->x_dtype) || !known_dtype(args->y_dtype) ||
        !known_dtype(args->residual_dtype))
        return fail(PHLOEM_E_ARG, "gemm: unknown dtype");
    if (args->gate && args->w->n % (2 * kPanelColumns))
        return fail(PHLOEM_E_ARG, "gemm: a gate needs gate and up packed in turn");
    try {
        run_gemm(*ctx, *args);
    } catch (const std::exception &error) {
        return fail(PHLOEM_E_MEMORY, "gemm: %s", error.what());
    }
    return PHLOEM_OK;
}

int32_t phloem_rmsnorm(phloem_ctx *ctx, const void *x, void *residual, const float *w, void *y,
                       int32_t dtype, int64_t m, int64_t d, float eps) {
    if (!ctx || m < 0 || d < 1 || (m && (!x || !w || !y)) || !known_dtype(dtype))
        return fail(PHLOEM_E_ARG, "rmsnorm: shape (%lld, %lld), dtype %d", (long long)m,
                    (long long)d, dtype);
    run_rmsnorm(*ctx, x, residual, w, y, dtype, dtype, m, d, eps);
    return PHLOEM_OK;
}

int32_t phloem_silu_mul(phloem_ctx *ctx, const void *gate, const void *up, void *y, int32_t dtype,
                        int64_t m, int64_t d, int64_t in_stride) {
    if (!ctx || m < 0 || d < 1 || in_stride < d || (m && (!gate || !up || !y)) ||
        !known_dtype(dtype))
        return fail(PHLOEM_E_ARG, "silu_mul: shape (%lld, %lld), dtype %d", (long long)m,
                    (long long)d, dtype);
    over_rows(*ctx, m, 4 * d, [&](int64_t row, int64_t rows) {
        ctx->kernels->silu_mul(advance(gate, row * in_stride, dtype),
                               advance(up, row * in_stride, dtype), advance(y, row * d, dtype),
                               dtype, rows, d, in_stride);
    });
    return PHLOEM_OK;
}

int32_t phloem_embedding(phloem_ctx *ctx, const int32_t *ids, const phloem_weight *table, void *y,
                         int32_t y_dtype, int64_t m) {
    if (!ctx || !table || m < 0 || (m && (!ids || !y)) || !known_dtype(y_dtype))
        return fail(PHLOEM_E_ARG, "embedding: %lld rows, dtype %d", (long long)m, y_dtype);
    if (int32_t code = check_weight(*table)) return code;
    for (int64_t i = 0; i < m; ++i)
        if (ids[i] < 0 || ids[i] >= table->n)
            return fail(PHLOEM_E_ARG, "embedding: id %d outside 0 ... %lld", ids[i],
                        (long long)table->n - 1);
    try {
        run_embedding(*ctx, ids, *table, y, y_dtype, m);
    } catch (const std::exception &error) {
        return fail(PHLOEM_E_MEMORY, "embedding: %s", error.what());
    }
    return PHLOEM_OK;
}

int32_t phloem_rope_kv_write(phloem_ctx *ctx, const phloem_rope_args *args,
                             const phloem_kv_layer *kv, const phloem_batch *batch) {
    if (!ctx || !args || !kv || !batch) return fail(PHLOEM_E_ARG, "rope: null pointer");
    // The positions themselves must lie in the table: a window of one token.
    if (int32_t code = check_batch(*kv, *batch, 1)) return code;
    if (batch->num_tokens == 0) return PHLOEM_OK;
    if ((!args->q && args->num_heads > 0) || !args->k || (!args->v && !is_latent(*kv)) ||
        !known_dtype(args->dtype) ||
        (args->rotary_dim > 0 && (!args->cos || !args->sin)))
        return fail(PHLOEM_E_ARG, "rope: null pointer or unknown dtype");
    if (args->rotary_dim < 0 || args->rotary_dim % 2 || args->rotary_dim > kv->head_dim)
        return fail(PHLOEM_E_ARG, "rope: rotary_dim %d of head_dim %d", args->rotary_dim,
                    kv->head_dim);
    for (int32_t i = 0; args->rotary_dim > 0 && i < batch->num_tokens; ++i)
        if (batch->positions[i] >= args->max_position)
            return fail(PHLOEM_E_ARG, "rope: position %d, tables end at %lld",
                        batch->positions[i], (long long)args->max_position);
    run_rope(*ctx, *args, *kv, *batch);
    return PHLOEM_OK;
}

int32_t phloem_latent_write(phloem_ctx *ctx, const phloem_latent_args *args,
                            const phloem_kv_layer *kv, const phloem_batch *batch) {
    if (!ctx || !args || !kv || !batch) return fail(PHLOEM_E_ARG, "latent: null pointer");
    if (int32_t code = check_batch(*kv, *batch, 1)) return code;
    if (batch->num_tokens == 0) return PHLOEM_OK;
    const int64_t q_width = (int64_t)args->num_heads * args->q_dim;
    if (!args->q || !args->rows || !args->cos || !args->sin || !args->norm ||
        args->num_heads < 1 || args->q_stride < q_width || args->rows_stride < kv->head_dim)
        return fail(PHLOEM_E_ARG, "latent: null pointer, or a stride below %lld and %d",
                    (long long)q_width, kv->head_dim);
    if (!is_latent(*kv) || kv->num_kv_heads != 1 || kv->head_dim > kMostRowNumbers ||
        args->rotary_dim < 2 || args->rotary_dim % 2 || args->rotary_dim > args->q_dim ||
        args->rotary_dim != kv->tail_dim)
        return fail(PHLOEM_E_ARG, "latent: a rotary part of %d in rows of %d, queries of %d",
                    args->rotary_dim, kv->head_dim, args->q_dim);
    for (int32_t i = 0; i < batch->num_tokens; ++i)
        if (batch->positions[i] >= args->max_position)
            return fail(PHLOEM_E_ARG, "latent: position %d, tables end at %lld",
                        batch->positions[i], (long long)args->max_position);
    over_tokens(*ctx, *batch, q_width + 2 * kv->head_dim, [&](int32_t row, int32_t t0, int32_t t1) {
        ctx->kernels->latent(*args, *kv, *batch, row, t0, t1);
    });
    return PHLOEM_OK;
}

int32_t phloem_argmax(phloem_ctx *ctx, const void *x, int32_t dtype, int64_t m, int64_t n,
                      int64_t stride, int64_t *out) {
    if (!ctx || m < 0 || n < 1 || stride < n || (m && (!x || !out)) || !known_dtype(dtype))
        return fail(PHLOEM_E_ARG, "argmax: shape (%lld, %lld)", (long long)m, (long long)n);
    over_rows(*ctx, m, n, [&](int64_t row, int64_t rows) {
        for (int64_t r = row; r < row + rows; ++r)
            out[r] = ctx->kernels->argmax(advance(x, r * stride, dtype), dtype, n);
    });
    return PHLOEM_OK;
}

int32_t phloem_top_k(phloem_ctx *ctx, const void *x, int32_t dtype, int64_t n, int64_t k,
                     float *values, int64_t *indices, float *lse) {
    if (!ctx || !x || !values || !indices || n < 1 || k < 1 || k > n || !known_dtype(dtype))
        return fail(PHLOEM_E_ARG, "top_k: %lld of %lld", (long long)k, (long long)n);
    ctx->kernels->top_k(x, dtype, n, k, values, indices, lse);
    return PHLOEM_OK;
}

int32_t phloem_copy_pages(phloem_ctx *ctx, void *dst, const void *src, const int64_t *dst_slots,
                          const int64_t *src_slots, int64_t num_pages, int64_t page_bytes) {
    if (!ctx || num_pages < 0 || page_bytes < 1 ||
        (num_pages && (!dst || !src || !dst_slots || !src_slots)))
        return fail(PHLOEM_E_ARG, "copy_pages: %lld pages of %lld bytes", (long long)num_pages,
                    (long long)page_bytes);
    ctx->pool.run(num_pages, [&](int64_t i, int) {
        stream_copy((char *)dst + dst_slots[i] * page_bytes,
                    (const char *)src + src_slots[i] * page_bytes, page_bytes);
    });
    return PHLOEM_OK;
}

}  // extern "C"
