// One decoder layer in one call, or in two with a meeting of ranks between them.
//
//   hidden -> norm -> q|k|v -> RoPE, K and V into pages -> attention over pages -> o (+ hidden)
//          -> norm -> act(gate) * up -> down (+ hidden)
//
// With post norms, what o and down give passes through a norm on its way to hidden.
//
// Between the steps everything is f32 in the workspace, or tiles where they are what a product takes
// and all it is for; `hidden` keeps the model's dtype. Large
// batches pass in chunks of rows, so that the workspace stays small; attention sees them whole.
#include <algorithm>
#include <exception>

#include "codec.h"
#include "context.h"

namespace phloem {
namespace {

constexpr int64_t kChunkRows = 2048;

struct Layer {
    phloem_ctx &ctx;
    const phloem_layer &layer;
    const phloem_kv_layer &kv;
    const phloem_batch &batch;
    char *hidden;
    int32_t dtype;
    int64_t q_dim, kv_dim, qkv_dim;
    float *qkv;

    void *hidden_row(int64_t row) const {
        return hidden + row * layer.hidden * dtype_bytes(dtype);
    }

    // What products multiply.
    struct Rows {
        const void *data;
        int32_t dtype;
        int64_t stride;
    };

    // For a product with w.
    Rows norm(int64_t row, int64_t rows, const float *weight, const phloem_weight &w) const {
        const int64_t d = layer.hidden;
        if (takes_tiles(ctx, w)) {
            uint16_t *out = ctx.normed.get<uint16_t>(tiles_size(rows, d));
            run_rmsnorm_tiles(ctx, hidden_row(row), weight, out, dtype, rows, d, layer.norm_eps);
            return {out, kTiles, d};
        }
        float *out = ctx.normed.get<float>(rows * d);
        run_rmsnorm(ctx, hidden_row(row), nullptr, weight, out, dtype, PHLOEM_F32, rows, d,
                    layer.norm_eps);
        return {out, PHLOEM_F32, d};
    }

    static phloem_gemm_args product(const Rows &x, const phloem_weight &w, int64_t m) {
        phloem_gemm_args args{};
        args.x = x.data;
        args.x_stride = x.stride;
        args.x_dtype = x.dtype;
        args.w = &w;
        args.m = m;
        return args;
    }

    Rows activation(const Rows &x, int64_t m) const {
        const int64_t inner = layer.down.k;
        const bool tiles = takes_tiles(ctx, layer.gate_up) && takes_tiles(ctx, layer.down) &&
                           inner % kBf16Depth == 0;
        phloem_gemm_args args = product(x, layer.gate_up, m);
        args.y = tiles ? (void *)ctx.activation.get<uint16_t>(tiles_size(m, inner))
                       : (void *)ctx.activation.get<float>(m * inner);
        args.y_dtype = tiles ? kTiles : (int32_t)PHLOEM_F32;
        args.y_stride = inner;
        args.gate = layer.gate;
        run_gemm(ctx, args);
        return {args.y, args.y_dtype, inner};
    }

    void to_hidden(const Rows &x, const phloem_weight &w, const float *post_norm, int64_t row,
                   int64_t rows) const {
        phloem_gemm_args args = product(x, w, rows);
        if (post_norm) {  // `normed` is free: x is not in it
            float *out = ctx.normed.get<float>(rows * layer.hidden);
            args.y = out;
            args.y_stride = layer.hidden;
            run_gemm(ctx, args);
            run_rmsnorm_add(ctx, out, post_norm, hidden_row(row), dtype, rows, layer.hidden,
                            layer.norm_eps);
            return;
        }
        args.y = hidden_row(row);
        args.residual = args.y;
        args.y_stride = args.residual_stride = layer.hidden;
        args.y_dtype = args.residual_dtype = dtype;
        run_gemm(ctx, args);
    }

    void rope_and_write() const {
        phloem_rope_args rope{};
        rope.q = qkv;
        rope.k = qkv + q_dim;
        rope.v = qkv + q_dim + kv_dim;
        rope.cos = layer.cos;
        rope.sin = layer.sin;
        rope.q_norm = layer.q_norm;
        rope.k_norm = layer.k_norm;
        rope.q_stride = rope.k_stride = rope.v_stride = qkv_dim;
        rope.max_position = layer.max_position;
        rope.num_heads = layer.num_heads;
        rope.rotary_dim = layer.rotary_dim;
        rope.norm_eps = layer.norm_eps;
        run_rope(ctx, rope, kv, batch);
    }

    void attend() const {
        phloem_attention_args attention{};
        attention.q = attention.out = qkv;  // a task reads its queries before it writes them
        attention.q_stride = attention.out_stride = qkv_dim;
        attention.num_heads = layer.num_heads;
        attention.sinks = layer.sinks;
        attention.window = layer.window;
        attention.scale = layer.scale;
        attention.softcap = layer.softcap;
        run_attention(ctx, {attention, kv, batch});
    }

    template <class F> void chunks(const F &f) const {
        for (int64_t row = 0; row < batch.num_tokens; row += kChunkRows)
            f(row, std::min<int64_t>(kChunkRows, batch.num_tokens - row));
    }

    void project() const {
        chunks([&](int64_t row, int64_t rows) {
            phloem_gemm_args args =
                product(norm(row, rows, layer.attn_norm, layer.qkv), layer.qkv, rows);
            args.y = qkv + row * qkv_dim;
            args.y_stride = qkv_dim;
            run_gemm(ctx, args);
        });
        rope_and_write();
    }

    void output() const {
        chunks([&](int64_t row, int64_t rows) {
            to_hidden({qkv + row * qkv_dim, PHLOEM_F32, qkv_dim}, layer.o, layer.post_attn_norm,
                      row, rows);
            const Rows inner =
                activation(norm(row, rows, layer.mlp_norm, layer.gate_up), rows);
            to_hidden(inner, layer.down, layer.post_mlp_norm, row, rows);
        });
    }
};

int32_t check_layer(const phloem_layer &layer, const phloem_kv_layer &kv) {
    if (is_latent(kv) || value_dim(kv) != kv.head_dim)
        return fail(PHLOEM_E_ARG, "layer: values of %lld numbers, keys of %d",
                    (long long)value_dim(kv), kv.head_dim);
    for (const phloem_weight *w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
        if (int32_t code = check_weight(*w)) return code;
    if (!layer.attn_norm || !layer.mlp_norm || !layer.cos || !layer.sin)
        return fail(PHLOEM_E_ARG, "layer: null pointer");
    const int64_t hidden = layer.hidden, q = (int64_t)layer.num_heads * kv.head_dim;
    const int64_t kv_dim = (int64_t)kv.num_kv_heads * kv.head_dim, inner = layer.down.k;
    if (layer.num_heads < 1 || layer.num_heads % kv.num_kv_heads || layer.window < 0 ||
        layer.rotary_dim < 0 || layer.rotary_dim % 2 || layer.rotary_dim > kv.head_dim)
        return fail(PHLOEM_E_ARG, "layer: %d heads, %d KV heads, rotary_dim %d", layer.num_heads,
                    kv.num_kv_heads, layer.rotary_dim);
    if ((layer.gate != PHLOEM_GATE_SILU && layer.gate != PHLOEM_GATE_GELU_TANH) ||
        !(layer.softcap >= 0))
        return fail(PHLOEM_E_ARG, "layer: gate %d, softcap %g", layer.gate, layer.softcap);
    if (layer.qkv.k != hidden || layer.qkv.n != q + 2 * kv_dim || layer.o.k != q ||
        layer.o.n != hidden || layer.gate_up.k != hidden || layer.gate_up.n != 2 * inner ||
        layer.down.n != hidden || inner % kPanelColumns)
        return fail(PHLOEM_E_ARG, "layer: weights do not fit hidden %d and each other",
                    layer.hidden);
    return PHLOEM_OK;
}

// The checks of all calls below, then f(layer); qkv null: in the workspace.
template <class F>
int32_t with_layer(phloem_ctx *ctx, const phloem_layer *layer, const phloem_kv_layer *kv,
                   const phloem_batch *batch, void *hidden, int32_t dtype, float *qkv, const F &f) {
    if (!ctx || !layer || !kv || !batch) return fail(PHLOEM_E_ARG, "layer: null pointer");
    if (int32_t code = check_batch(*kv, *batch, layer->window)) return code;
    if (batch->num_tokens == 0) return PHLOEM_OK;
    if (!hidden || (dtype != PHLOEM_F32 && dtype != PHLOEM_BF16))
        return fail(PHLOEM_E_ARG, "layer: null hidden or unknown dtype %d", dtype);
    if (int32_t code = check_layer(*layer, *kv)) return code;
    for (int32_t i = 0; i < batch->num_tokens; ++i)
        if (batch->positions[i] >= layer->max_position)
            return fail(PHLOEM_E_ARG, "layer: position %d, tables end at %lld",
                        batch->positions[i], (long long)layer->max_position);
    const int64_t q_dim = (int64_t)layer->num_heads * kv->head_dim;
    const int64_t kv_dim = (int64_t)kv->num_kv_heads * kv->head_dim, qkv_dim = q_dim + 2 * kv_dim;
    try {
        if (!qkv) qkv = ctx->qkv.get<float>(batch->num_tokens * qkv_dim);
        f(Layer{*ctx, *layer, *kv, *batch, (char *)hidden, dtype, q_dim, kv_dim, qkv_dim, qkv});
    } catch (const std::exception &error) {
        return fail(PHLOEM_E_MEMORY, "layer: %s", error.what());
    }
    return PHLOEM_OK;
}

}  // namespace
}  // namespace phloem

using namespace phloem;

extern "C" {

int32_t phloem_layer_forward(phloem_ctx *ctx, const phloem_layer *layer, const phloem_kv_layer *kv,
                             const phloem_batch *batch, void *hidden, int32_t dtype) {
    return with_layer(ctx, layer, kv, batch, hidden, dtype, nullptr, [](const Layer &whole) {
        whole.project();
        whole.attend();
        whole.output();
    });
}

int32_t phloem_layers_forward(phloem_ctx *ctx, const phloem_layer_step *steps, int32_t num_steps,
                              const phloem_batch *const *batches, int32_t num_batches,
                              void *hidden, int32_t dtype) {
    if (!steps || !batches) return fail(PHLOEM_E_ARG, "layers: null pointer");
    for (int32_t i = 0; i < num_steps; ++i) {
        const phloem_layer_step &step = steps[i];
        if (step.component < 0 || step.component >= num_batches)
            return fail(PHLOEM_E_ARG, "layers: component %d of %d", step.component, num_batches);
        if (int32_t code = phloem_layer_forward(ctx, step.layer, step.kv, batches[step.component],
                                                hidden, dtype))
            return code;
    }
    return PHLOEM_OK;
}

int32_t phloem_layer_project(phloem_ctx *ctx, const phloem_layer *layer, const phloem_kv_layer *kv,
                             const phloem_batch *batch, void *hidden, int32_t dtype, float *qkv) {
    if (!qkv) return fail(PHLOEM_E_ARG, "layer: null qkv");
    return with_layer(ctx, layer, kv, batch, hidden, dtype, qkv,
                      [](const Layer &whole) { whole.project(); });
}

int32_t phloem_layer_finish(phloem_ctx *ctx, const phloem_layer *layer, const phloem_kv_layer *kv,
                            const phloem_batch *batch, void *hidden, int32_t dtype, float *qkv) {
    if (!qkv) return fail(PHLOEM_E_ARG, "layer: null qkv");
    return with_layer(ctx, layer, kv, batch, hidden, dtype, qkv, [](const Layer &whole) {
        whole.attend();
        whole.output();
    });
}

int32_t phloem_layer_output(phloem_ctx *ctx, const phloem_layer *layer, const phloem_kv_layer *kv,
                            const phloem_batch *batch, void *hidden, int32_t dtype, float *qkv) {
    if (!qkv) return fail(PHLOEM_E_ARG, "layer: null qkv");
    return with_layer(ctx, layer, kv, batch, hidden, dtype, qkv,
                      [](const Layer &whole) { whole.output(); });
}

}  // extern "C"
