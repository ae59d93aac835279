// Products in which each head has a matrix of its own: into the space of latents and out of it.
#include <algorithm>

#include "context.h"

namespace phloem {
namespace {

// As gemm.cpp: from so many rows on tasks cut rows, too; and so many rows they have.
constexpr int64_t kManyRows = 256, kTaskRows = 96;

}  // namespace
}  // namespace phloem

using namespace phloem;

extern "C" int32_t phloem_heads_gemm(phloem_ctx *ctx, const phloem_heads_args *args) {
    if (!ctx || !args || !args->w) return fail(PHLOEM_E_ARG, "heads: null pointer");
    const phloem_weight &w = *args->w;
    if (int32_t code = check_weight(w)) return code;
    if (args->m == 0) return PHLOEM_OK;
    const int64_t x_width = (args->num_heads - 1) * args->x_head + w.k;
    const int64_t y_width = (args->num_heads - 1) * args->y_head + w.n;
    if (!args->x || !args->y || args->m < 0 || args->num_heads < 1 || args->x_head < 0 ||
        args->y_head < w.n || args->x_stride < x_width || args->y_stride < y_width ||
        is_blocks(w.format) || args->w_head_bytes < phloem_packed_bytes(w.format, w.n, w.k))
        return fail(PHLOEM_E_ARG, "heads: %d heads, m %lld, strides %lld, %lld, format %d",
                    args->num_heads, (long long)args->m, (long long)args->x_stride,
                    (long long)args->y_stride, w.format);
    const int64_t tile = ctx->kernels->rows_per_tile;
    const int64_t rows = args->m < kManyRows ? args->m : std::max(tile, kTaskRows / tile * tile);
    // Neighbouring tasks are of one head, whose matrix stays in the cache.
    const int64_t blocks = ceil_div(args->m, rows);
    ctx->pool.run(args->num_heads * blocks, [&](int64_t i, int) {
        const int64_t head = i / blocks, row0 = i % blocks * rows;
        phloem_weight mine = w;
        mine.data = (const char *)w.data + head * args->w_head_bytes;
        mine.bias = nullptr;
        GemmTask task{};
        task.x = args->x + row0 * args->x_stride + head * args->x_head;
        task.w = &mine;
        task.y = args->y + row0 * args->y_stride + head * args->y_head;
        task.m = std::min(rows, args->m - row0);
        task.x_stride = args->x_stride;
        task.y_stride = args->y_stride;
        task.panel1 = ceil_div(w.n, kPanelColumns);
        ctx->kernels->gemm(task);
    });
    return PHLOEM_OK;
}
