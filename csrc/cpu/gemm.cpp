// How matrix products are cut into tasks.
#include <algorithm>

#include "context.h"

namespace phloem {
namespace {

// Rough rates of one core: they only choose the size of tasks.
constexpr double kBytesPerUs = 9e3, kFlopsPerUs = 6e4, kTaskUs = 25,
                 kLeastTaskUs = 6;
constexpr int64_t kManyRows = 256;      // from here on tasks cut rows too
constexpr int64_t kRowsCacheBytes = 192 << 10;  // activations of a task, in L2
constexpr int64_t kLeastRows = 96;      // of a task, or a panel is read for too few of them
constexpr int64_t kAloneElements = 4096;        // activations converted by the caller alone
// Of products with tiles.
constexpr int64_t kTileRowsBytes = 800 << 10;  // activations of a task, in L2 beside panels
constexpr int64_t kOwnRows = 256;              // of a thread: with fewer, reading all of W takes longer
constexpr int64_t kLeastTileRows = 160;        // or panels are read faster than memory gives them

double weight_bytes(const phloem_weight &w) {
    if (is_blocks(w.format))
        return (double)block_bytes(w.format) / (kBlockWeights * kPanelColumns);
    return w.format == PHLOEM_W_F32 ? 4 : 2;
}

struct Gemm {
    phloem_ctx &ctx;
    const phloem_gemm_args &args;
    const phloem_weight &w;
    int64_t panels;

    Gemm(phloem_ctx &c, const phloem_gemm_args &a)
        : ctx(c), args(a), w(*a.w), panels(ceil_div(a.w->n, kPanelColumns)) {}

    // Whether activations become bf16.
    bool rounds() const { return ctx.bf16 && w.format == PHLOEM_W_BF16; }
    bool tiles() const { return takes_tiles(ctx, w); }

    GemmTask task(const float *x, int64_t x_stride, int64_t row0, int64_t rows) const {
        GemmTask t{};
        t.x = x;
        t.x_stride = x_stride;
        t.w = &w;
        if (args.y_dtype == kTiles)
            t.y = (uint16_t *)args.y + tile_at(row0, 0, ceil_div(args.y_stride, kBf16Depth));
        else t.y = (char *)args.y + row0 * args.y_stride * dtype_bytes(args.y_dtype);
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

    // Panel pairs of one task of m rows: it takes about kTaskUs, or less if all threads then end
    // together.
    int64_t pairs_per_task(int64_t m) const {
        const double flops_per_us = rounds() ? ctx.bf16->flops_per_us : kFlopsPerUs;
        const double columns = 2.0 * kPanelColumns * w.k;
        const double us = columns * weight_bytes(w) / kBytesPerUs +
                          columns * 2.0 * (m - 1) / flops_per_us;
        const int64_t pairs = ceil_div(panels, 2), threads = ctx.pool.size();
        int64_t best = std::max<int64_t>(1, (int64_t)(kTaskUs / us));
        const auto longest = [&](int64_t step) {  // of a thread's shares, in pairs
            return ceil_div(ceil_div(pairs, step), threads) * step;
        };
        const int64_t unit = m <= wide_rows() ? 2 : 1;
        for (int64_t step = std::min(best, pairs) / unit * unit;
             step > 0 && step * us >= kLeastTaskUs; step -= unit)
            if (longest(step) < longest(best)) best = step;
        return best;
    }

    // So many rows pass over four panels at once.
    int64_t wide_rows() const { return tiles() ? kTileRows : 1; }

    template <class F> void over_panels(const F &f) const {
        const int64_t step = 2 * pairs_per_task(args.m);
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

    // Rows of one task: their activations (row_bytes each) stay in the cache, and there are enough
    // tasks for all threads.
    int64_t rows_per_task(int64_t row_bytes, int64_t tile, int64_t tasks_per_thread = 4) const {
        const int64_t least = std::max<int64_t>(kLeastRows / tile, 1) * tile;
        const int64_t rows = std::max(kRowsCacheBytes / row_bytes / tile * tile, least);
        const int64_t most = ceil_div(args.m, tasks_per_thread * ctx.pool.size());
        return std::max(tile, std::min(rows, ceil_div(most, tile) * tile));
    }

    // f(row0, rows, thread) over all rows, at most `most` of them at once: whole tiles, and as many
    // for each thread, so that all of them end together.
    template <class F> void over_rows(int64_t most, int64_t tile, const F &f) const {
        const int64_t tiles = ceil_div(args.m, tile), threads = ctx.pool.size();
        const int64_t tasks = std::min(tiles, ceil_div(ceil_div(args.m, most), threads) * threads);
        ctx.pool.run(tasks, [&](int64_t i, int thread) {
            const int64_t row0 = tiles * i / tasks * tile, end = tiles * (i + 1) / tasks * tile;
            f(row0, std::min(end, args.m) - row0, thread);
        });
    }

    void many_rows() const {
        const int64_t k = w.k, tile = ctx.kernels->rows_per_tile, rows = rows_per_task(k * 4, tile);
        float *scratch = ctx.scratch.get<float>(ctx.pool.size() * rows * k);
        over_rows(rows, tile, [&](int64_t row0, int64_t n, int thread) {
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

    int64_t padded_k() const { return ceil_div(w.k, kBf16Depth) * kBf16Depth; }

    // Rows row0 ... row0 + rows - 1 as bf16, in `out` or, if they are such rows, where they are.
    const uint16_t *round_rows(int64_t row0, int64_t rows, uint16_t *out, int64_t *stride) const {
        const char *x = (const char *)args.x + row0 * args.x_stride * dtype_bytes(args.x_dtype);
        if (rounded_already()) {
            *stride = args.x_stride;
            return (const uint16_t *)x;
        }
        *stride = padded_k();
        for (int64_t r = 0; r < rows; ++r)
            ctx.bf16->round(x + r * args.x_stride * dtype_bytes(args.x_dtype), args.x_dtype, w.k,
                            out + r * padded_k());
        return out;
    }
    bool rounded_already() const { return args.x_dtype == PHLOEM_BF16 && w.k == padded_k(); }

    void few_rows_bf16() const {
        uint16_t *x = nullptr;
        if (!rounded_already()) {
            x = (uint16_t *)ctx.xq.get<char>(args.m * padded_k() * 2);
            const int64_t rows = std::max<int64_t>(1, kAloneElements / w.k);
            ctx.pool.run(ceil_div(args.m, rows), [&](int64_t i, int) {
                int64_t stride;
                round_rows(i * rows, std::min(rows, args.m - i * rows),
                           x + i * rows * padded_k(), &stride);
            });
        }
        const int64_t stride = x ? padded_k() : args.x_stride;
        const uint16_t *from = x ? x : (const uint16_t *)args.x;
        over_panels([&](int64_t p0, int64_t p1, int) {
            GemmTask t = task(nullptr, 0, 0, args.m);
            t.panel0 = p0;
            t.panel1 = p1;
            ctx.bf16->gemm(*ctx.kernels, t, from, stride);
        });
    }

    void many_rows_bf16() const {
        const int64_t tile = ctx.bf16->rows_per_tile, rows = rows_per_task(padded_k() * 2, tile, 2);
        uint16_t *scratch = nullptr;
        if (!rounded_already())
            scratch = (uint16_t *)ctx.scratch.get<char>(ctx.pool.size() * rows * padded_k() * 2);
        over_rows(rows, tile, [&](int64_t row0, int64_t n, int thread) {
            int64_t stride;
            const uint16_t *x =
                round_rows(row0, n, scratch ? scratch + thread * rows * padded_k() : nullptr,
                           &stride);
            GemmTask t = task(nullptr, 0, row0, n);
            t.panel1 = panels;
            ctx.bf16->gemm(*ctx.kernels, t, x, stride);
        });
    }

    // Rows row0 ... end - 1 (whole tiles) of x as tiles.
    void round_tiles(int64_t row0, int64_t end, uint16_t *x) const {
        if (row0 >= end) return;
        const char *from = (const char *)args.x + row0 * args.x_stride * dtype_bytes(args.x_dtype);
        ctx.kernels->round_tiles(from, args.x_dtype, args.x_stride, end - row0, w.k,
                                 x + tile_at(row0, 0, ceil_div(w.k, kBf16Depth)));
    }

    // All rows as tiles.
    const uint16_t *rows_tiled() const {
        if (args.x_dtype == kTiles) return (const uint16_t *)args.x;
        uint16_t *x = ctx.xq.get<uint16_t>(tiles_size(args.m, w.k));
        const int64_t step = std::max<int64_t>(1, kAloneElements / w.k / kTileRows) * kTileRows;
        over_own_rows(ctx, args.m, step,
                      [&](int64_t row0, int64_t end) { round_tiles(row0, end, x); });
        return x;
    }

    void multiply(const uint16_t *x, int64_t row0, int64_t end, int64_t pair0, int64_t pair1) const {
        if (row0 >= end || pair0 >= pair1) return;
        GemmTask t = task(nullptr, 0, row0, end - row0);
        t.panel0 = 2 * pair0;
        t.panel1 = std::min(panels, 2 * pair1);
        if (t.panel1 + 2 <= panels)
            t.next = (const char *)w.data + t.panel1 * panel_bytes(w.format, w.k);
        ctx.bf16->gemm(*ctx.kernels, t, x + tile_at(row0, 0, ceil_div(w.k, kBf16Depth)), 0);
    }

    // Many rows: each thread has its own, the same ones in all products, in parts whose tiles stay
    // in the cache. Few rows: it has its own panels.
    void over_tiles() const {
        const uint16_t *x = rows_tiled();
        const int64_t pairs = ceil_div(panels, 2), threads = ctx.pool.size();
        if (args.m < kOwnRows * threads) {
            const int64_t step = pairs_per_task(args.m), mine = ceil_div(pairs, threads);
            const int64_t cuts = ceil_div(mine, step);
            ctx.pool.run_groups(cuts, [&](int64_t group, int64_t i, int) {
                const int64_t first = group * mine, end = std::min(pairs, first + mine);
                multiply(x, 0, args.m, first + i * step, std::min(end, first + (i + 1) * step));
            });
            return;
        }
        const int64_t most = std::max(kLeastTileRows, kTileRowsBytes / (2 * w.k));
        const int64_t parts = ceil_div(args.m, threads * most), all = threads * parts;
        const int64_t step = pairs_per_task(ceil_div(args.m, all)), cuts = ceil_div(pairs, step);
        const int64_t unit = ctx.bf16->rows_per_tile, blocks = ceil_div(args.m, unit);
        ctx.pool.run_groups(parts * cuts, [&](int64_t group, int64_t i, int) {
            const int64_t part = group * parts + i / cuts, pair = i % cuts * step;
            multiply(x, blocks * part / all * unit,
                     std::min(args.m, blocks * (part + 1) / all * unit), pair,
                     std::min(pairs, pair + step));
        });
    }

    // All rows as 16-bit integers.
    const char *rows_quantised() const {
        int64_t stride;
        const float *x = rows_f32(&stride);
        const int64_t row_bytes = xq_row_bytes();
        char *xq = ctx.xq.get<char>(args.m * row_bytes);
        const int64_t rows = std::max<int64_t>(1, kAloneElements / w.k);
        ctx.pool.run(ceil_div(args.m, rows), [&](int64_t i, int) {
            for (int64_t r = i * rows; r < std::min(args.m, (i + 1) * rows); ++r)
                ctx.kernels->quantize_x(x + r * stride, w.k, xq + r * row_bytes);
        });
        return xq;
    }

    int64_t xq_row_bytes() const { return ceil_div(w.k, kBlockWeights) * kXqBytes; }

    void few_rows_blocks() const {
        const char *xq = rows_quantised();
        over_panels([&](int64_t p0, int64_t p1, int) {
            GemmTask t = task(nullptr, 0, 0, args.m);
            t.panel0 = p0;
            t.panel1 = p1;
            ctx.kernels->gemm_blocks(t, xq);
        });
    }

    void many_rows_blocks() const {
        const char *xq = rows_quantised();
        const int64_t tile = ctx.kernels->rows_per_tile, rows = rows_per_task(xq_row_bytes(), tile);
        over_rows(rows, tile, [&](int64_t row0, int64_t n, int) {
            GemmTask t = task(nullptr, 0, row0, n);
            t.panel1 = panels;
            ctx.kernels->gemm_blocks(t, xq + row0 * xq_row_bytes());
        });
    }
};

}  // namespace

int32_t check_weight(const phloem_weight &w) {
    if (!w.data || w.n < 1 || w.k < 1)
        return fail(PHLOEM_E_ARG, "weight: null or empty (%lld, %lld)", (long long)w.n,
                    (long long)w.k);
    if (w.format < 0 || w.format >= PHLOEM_NUM_W)
        return fail(PHLOEM_E_ARG, "weight: unknown format %d", w.format);
    return PHLOEM_OK;
}

void run_gemm(phloem_ctx &ctx, const phloem_gemm_args &args) {
    const Gemm gemm(ctx, args);
    const bool blocks = is_blocks(args.w->format), few = args.m < kManyRows;
    if (gemm.tiles()) gemm.over_tiles();
    else if (gemm.rounds() && few) gemm.few_rows_bf16();
    else if (gemm.rounds()) gemm.many_rows_bf16();
    else if (blocks && few) gemm.few_rows_blocks();
    else if (blocks) gemm.many_rows_blocks();
    else if (few) gemm.few_rows();
    else gemm.many_rows();
}

}  // namespace phloem
