// What latent attention does to a token before it attends.
#pragma once
#include "pointwise.inl"

namespace phloem {
namespace PHLOEM_NS {

// A row of the pool: its lead normalised, its last numbers rotated.
static void latent_row(const phloem_latent_args &args, const phloem_rope_args &turn, const float *x,
                       int64_t lead, const float *cos, const float *sin, float *out) {
    norm_row(x, args.norm, out, lead, args.norm_eps);
    rope_head(x + lead, out + lead, nullptr, turn, args.rotary_dim, cos, sin);
}

static void latent(const phloem_latent_args &args, const phloem_kv_layer &kv,
                   const phloem_batch &batch, int32_t row, int32_t tok0, int32_t tok1) {
    const int64_t half = args.rotary_dim / 2, lead = kv.head_dim - args.rotary_dim;
    const int64_t plain = args.q_dim - args.rotary_dim;
    const int64_t *table = batch.tables + row * batch.table_stride;
    const RowBounds bounds = row_bounds(batch, row);
    phloem_rope_args turn{};
    turn.rotary_dim = args.rotary_dim;
    for (int64_t token = tok0; token < tok1; ++token) {
        const int64_t pos = batch.positions[token];
        const float *cos = args.cos + pos * half, *sin = args.sin + pos * half;
        for (int64_t h = 0; h < args.num_heads; ++h) {
            float *q = args.q + token * args.q_stride + h * args.q_dim + plain;
            rope_head(q, q, nullptr, turn, args.rotary_dim, cos, sin);
        }
        if (pos < bounds.write_from || (args.kept && !args.kept[token])) continue;
        float numbers[kMostRowNumbers];
        latent_row(args, turn, args.rows + token * args.rows_stride, lead, cos, sin, numbers);
        write_value(kv, numbers,
                    table[pos / kv.page_size - bounds.base] * kv.page_stride +
                        pos % kv.page_size * kv.token_stride);
    }
}

}  // namespace PHLOEM_NS
}  // namespace phloem
