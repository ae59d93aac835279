// How matrix products are cut into tasks, and packing.
#include <algorithm>
#include <cstring>

#include "context.h"

namespace phloem {
namespace {

// Rough rates of one core: they only choose the size of tasks.
constexpr double kBytesPerUs = 9e3, kFlopsPerUs = 6e4, kTaskUs = 25;
constexpr int64_t kManyRows = 256;      // from here on tasks cut rows too
constexpr int64_t kFewBlockRows = 12;   // up to here GGUF blocks are multiplied as integers
constexpr int64_t kRowsCacheBytes = 192 << 10;  // f32 activations of a task, in L2

double weight_bytes(const phloem_weight &w) {
    if (is_blocks(w.format)) return (double)block_bytes(w.format) / kBlockWeights;
    return w.format == PHLOEM_W_F32 ? 4 : w.format == PHLOEM_W_BF16 ? 2 : 1;
}

struct Gemm {
    phloem_ctx &ctx;
    const phloem_gemm_args &args;
    const phloem_weight &w;
    int64_t panels;

    Gemm(phloem_ctx &c, const phloem_gemm_args &a)
        : ctx(c), args(a), w(*a.w), panels(ceil_div(a.w->n, kPanelColumns)) {}

    GemmTask task(const float *x, int64_t x_stride, int64_t row0, int64_t rows) const {
        GemmTask t{};
        t.x = x;
        t.x_stride = x_stride;
        t.w = &w;
        t.y = (char *)args.y + row0 * args.y_stride * dtype_bytes(args.y_dtype);
        if (args.residual)
            t.residual = (const char *)args.residual +
                         row0 * args.residual_stride * dtype_bytes(args.residual_dtype);
        t.m = rows;
        t.y_stride = args.y_stride;
        t.residual_stride = args.residual_stride;
        t.y_dtype = args.y_dtype;
        t.residual_dtype = args.residual_dtype;
        t.gate = args.gate;
        return t;
    }

    // Panel pairs of one task so that it takes about kTaskUs.
    int64_t pairs_per_task() const {
        const double columns = 2.0 * kPanelColumns * w.k;
        const double us = columns * weight_bytes(w) / kBytesPerUs +
                          columns * 2.0 * (args.m - 1) / kFlopsPerUs;
        return std::max<int64_t>(1, (int64_t)(kTaskUs / us));
    }

    template <class F> void over_panels(const F &f) const {
        const int64_t step = 2 * pairs_per_task();
        ctx.pool.run(ceil_div(panels, step), [&](int64_t i, int thread) {
            f(i * step, std::min(panels, (i + 1) * step), thread);
        });
    }

    // All rows as f32, converted (in parallel if they are many) or as they are.
    const float *rows_f32(int64_t *stride) const {
        if (args.x_dtype == PHLOEM_F32) {
            *stride = args.x_stride;
            return (const float *)args.x;
        }
        *stride = w.k;
        float *x = ctx.x.get<float>(args.m * w.k);
        const int64_t rows = std::max<int64_t>(1, 32768 / w.k);
        ctx.pool.run(ceil_div(args.m, rows), [&](int64_t i, int) {
            for (int64_t r = i * rows; r < std::min(args.m, (i + 1) * rows); ++r)
                ctx.kernels->to_f32((const uint16_t *)args.x + r * args.x_stride, args.x_dtype,
                                    x + r * w.k, w.k);
        });
        return x;
    }

    void few_rows() const {
        int64_t stride;
        const float *x = rows_f32(&stride);
        over_panels([&](int64_t p0, int64_t p1, int) {
            GemmTask t = task(x, stride, 0, args.m);
            t.panel0 = p0;
            t.panel1 = p1;
            ctx.kernels->gemm(t);
        });
    }

    void many_rows() const {
        const int64_t tile = ctx.kernels->rows_per_tile, k = w.k;
        int64_t rows = std::max(kRowsCacheBytes / (k * 4), 16 * tile) / tile * tile;
        const int64_t most = ceil_div(args.m, 4 * ctx.pool.size());
        rows = std::max(tile, std::min(rows, ceil_div(most, tile) * tile));
        float *scratch = ctx.scratch.get<float>(ctx.pool.size() * rows * k);
        ctx.pool.run(ceil_div(args.m, rows), [&](int64_t i, int thread) {
            const int64_t row0 = i * rows, n = std::min(rows, args.m - row0);
            const float *x = (const float *)args.x + row0 * args.x_stride;
            int64_t stride = args.x_stride;
            if (args.x_dtype != PHLOEM_F32) {
                float *mine = scratch + thread * rows * k;
                for (int64_t r = 0; r < n; ++r)
                    ctx.kernels->to_f32((const uint16_t *)args.x + (row0 + r) * args.x_stride,
                                        args.x_dtype, mine + r * k, k);
                x = mine;
                stride = k;
            }
            GemmTask t = task(x, stride, row0, n);
            t.panel1 = panels;
            ctx.kernels->gemm(t);
        });
    }

    void few_rows_blocks() const {
        int64_t stride;
        const float *x = rows_f32(&stride);
        const int64_t row_bytes = w.k / kBlockWeights * kXqBytes;
        char *xq = ctx.xq.get<char>(args.m * row_bytes);
        for (int64_t r = 0; r < args.m; ++r)
            ctx.kernels->quantize_x(x + r * stride, w.k, xq + r * row_bytes);
        over_panels([&](int64_t p0, int64_t p1, int) {
            GemmTask t = task(x, stride, 0, args.m);
            t.panel0 = p0;
            t.panel1 = p1;
            ctx.kernels->gemm_blocks(t, xq);
        });
    }

    // Widen two panels at a time to f32, then multiply all rows.
    void many_rows_blocks() const {
        int64_t stride;
        const float *x = rows_f32(&stride);
        float *scratch = ctx.scratch.get<float>(ctx.pool.size() * 2 * kPanelColumns * w.k);
        ctx.pool.run(ceil_div(panels, 2), [&](int64_t i, int thread) {
            float *wide = scratch + thread * 2 * kPanelColumns * w.k;
            const int64_t column = 2 * i * kPanelColumns;
            phloem_weight part = w;
            part.format = PHLOEM_W_F32;
            part.data = wide;
            part.n = std::min(2 * kPanelColumns, w.n - column);
            part.bias = w.bias ? w.bias + column : nullptr;
            const int64_t num_panels = ceil_div(part.n, kPanelColumns);
            for (int64_t p = 0; p < num_panels; ++p)
                ctx.kernels->dequantize(w, column + p * kPanelColumns,
                                        std::min(kPanelColumns, part.n - p * kPanelColumns),
                                        wide + p * kPanelColumns * w.k);
            GemmTask t = task(x, stride, 0, args.m);
            const int64_t out = args.gate ? column / 2 : column;
            t.w = &part;
            t.panel1 = num_panels;
            t.y = (char *)t.y + out * dtype_bytes(args.y_dtype);
            if (t.residual)
                t.residual = (const char *)t.residual + out * dtype_bytes(args.residual_dtype);
            ctx.kernels->gemm(t);
        });
    }
};

uint16_t round_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

struct Source {
    const void *data;
    int32_t dtype;
    int64_t stride;

    float at(int64_t row, int64_t column) const {
        const int64_t i = row * stride + column;
        if (dtype == PHLOEM_F32) return ((const float *)data)[i];
        const uint32_t u = (uint32_t)((const uint16_t *)data)[i] << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
};

// Rows row0 ... row0 + 15 of the source become one panel; rows from n on become zeros.
void pack_panel(int32_t format, const Source &source, int64_t row0, int64_t n, int64_t k,
                void *panel, float *scales) {
    const int64_t k_even = (k + 1) / 2 * 2;
    for (int64_t c = 0; c < kPanelColumns; ++c) {
        const bool real = row0 + c < n;
        float inverse = 0.0f;
        if (format == PHLOEM_W_I8 && real) {
            float top = 0.0f;
            for (int64_t i = 0; i < k; ++i) {
                const float a = source.at(row0 + c, i);
                top = std::max(top, a < 0 ? -a : a);
            }
            scales[c] = top / 127.0f;
            inverse = top > 0.0f ? 127.0f / top : 0.0f;
        }
        for (int64_t i = 0; i < k_even; ++i) {
            const float x = real && i < k ? source.at(row0 + c, i) : 0.0f;
            if (format == PHLOEM_W_BF16) {
                ((uint16_t *)panel)[(i / 2 * kPanelColumns + c) * 2 + i % 2] = round_bf16(x);
            } else if (format == PHLOEM_W_F32) {
                ((float *)panel)[i * kPanelColumns + c] = x;
            } else {
                const float q = x * inverse;
                ((int8_t *)panel)[i * kPanelColumns + c] = (int8_t)(q + (q < 0 ? -0.5f : 0.5f));
            }
        }
    }
}

int64_t panel_bytes(int32_t format, int64_t k) {
    const int64_t elements = (k + 1) / 2 * 2 * kPanelColumns;
    return elements * (format == PHLOEM_W_F32 ? 4 : format == PHLOEM_W_BF16 ? 2 : 1);
}

int32_t check_pack(int32_t format, const void *w, int32_t w_dtype, int64_t n, int64_t k,
                   int64_t w_stride, const void *out, const float *scales) {
    if (!w || !out) return fail(PHLOEM_E_ARG, "pack: null pointer");
    if (n < 1 || k < 1 || (!is_blocks(format) && w_stride < k))
        return fail(PHLOEM_E_ARG, "pack: shape (%lld, %lld), stride %lld", (long long)n,
                    (long long)k, (long long)w_stride);
    if (format < 0 || format > PHLOEM_W_Q8_0)
        return fail(PHLOEM_E_ARG, "pack: unknown weight format %d", format);
    if (w_dtype != PHLOEM_F32 && w_dtype != PHLOEM_BF16)
        return fail(PHLOEM_E_ARG, "pack: unknown dtype %d", w_dtype);
    if (format == PHLOEM_W_I8 && !scales) return fail(PHLOEM_E_ARG, "pack: int8 needs scales");
    return PHLOEM_OK;
}

}  // namespace

int32_t check_weight(const phloem_weight &w) {
    if (!w.data || w.n < 1 || w.k < 1)
        return fail(PHLOEM_E_ARG, "weight: null or empty (%lld, %lld)", (long long)w.n,
                    (long long)w.k);
    if (w.format < 0 || w.format > PHLOEM_W_Q8_0)
        return fail(PHLOEM_E_ARG, "weight: unknown format %d", w.format);
    if (w.format == PHLOEM_W_I8 && !w.scales)
        return fail(PHLOEM_E_ARG, "weight: int8 needs scales");
    if (is_blocks(w.format) && w.k % kBlockWeights)
        return fail(PHLOEM_E_ARG, "weight: k = %lld is not a multiple of 32", (long long)w.k);
    return PHLOEM_OK;
}

void run_gemm(phloem_ctx &ctx, const phloem_gemm_args &args) {
    const Gemm gemm(ctx, args);
    if (is_blocks(args.w->format)) {
        if (args.m <= kFewBlockRows) gemm.few_rows_blocks();
        else gemm.many_rows_blocks();
    } else if (args.m < kManyRows) {
        gemm.few_rows();
    } else {
        gemm.many_rows();
    }
}

}  // namespace phloem

using namespace phloem;

extern "C" {

int64_t phloem_packed_bytes(int32_t format, int64_t n, int64_t k) {
    if (n < 1 || k < 1 || format < 0 || format > PHLOEM_W_Q8_0)
        return fail(PHLOEM_E_ARG, "packed_bytes: format %d, shape (%lld, %lld)", format,
                    (long long)n, (long long)k);
    if (is_blocks(format)) return n * (k / kBlockWeights) * block_bytes(format);
    return ceil_div(n, kPanelColumns) * panel_bytes(format, k);
}

int32_t phloem_pack_weight(int32_t format, const void *w, int32_t w_dtype, int64_t n, int64_t k,
                           int64_t w_stride, void *out, float *scales) {
    if (int32_t code = check_pack(format, w, w_dtype, n, k, w_stride, out, scales)) return code;
    if (is_blocks(format)) return fail(PHLOEM_E_ARG, "pack: GGUF blocks are used as they are");
    const int64_t bytes = panel_bytes(format, k);
    for (int64_t p = 0; p * kPanelColumns < n; ++p)
        pack_panel(format, {w, w_dtype, w_stride}, p * kPanelColumns, n, k,
                   (char *)out + p * bytes, scales ? scales + p * kPanelColumns : nullptr);
    return PHLOEM_OK;
}

int32_t phloem_pack_gate_up(int32_t format, const void *gate, const void *up, int32_t w_dtype,
                            int64_t n, int64_t k, int64_t w_stride, void *out, float *scales) {
    if (int32_t code = check_pack(format, gate, w_dtype, n, k, w_stride, out, scales)) return code;
    if (!up) return fail(PHLOEM_E_ARG, "pack: null pointer");
    if (n % kPanelColumns)
        return fail(PHLOEM_E_ARG, "pack: %lld gate rows are not a multiple of 16", (long long)n);
    const void *sources[2] = {gate, up};
    if (is_blocks(format)) {
        const int64_t bytes = kPanelColumns * (k / kBlockWeights) * block_bytes(format);
        for (int64_t p = 0; p < 2 * n / kPanelColumns; ++p)
            memcpy((char *)out + p * bytes, (const char *)sources[p % 2] + p / 2 * bytes, bytes);
        return PHLOEM_OK;
    }
    const int64_t bytes = panel_bytes(format, k);
    for (int64_t p = 0; p < 2 * n / kPanelColumns; ++p)
        pack_panel(format, {sources[p % 2], w_dtype, w_stride}, p / 2 * kPanelColumns, n, k,
                   (char *)out + p * bytes, scales ? scales + p * kPanelColumns : nullptr);
    return PHLOEM_OK;
}

}  // extern "C"
