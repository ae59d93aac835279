// Attention over pages, read in place through the page table: what tiles and decodes share.
//
// Positions that a query must not see are masked by selection, never by a product, and positions
// beyond the last query (or before every window) are never read: their slots may hold NaN.
//
// Where the context is cut in parts, so that all threads work on one token, parts are merged.
#pragma once
#include <math.h>

#include "kernels.h"
#include "rows.inl"

namespace phloem {
namespace PHLOEM_NS {

struct KvReader {
    const phloem_kv_layer &kv;
    const int64_t *table;  // from page `first_page` on
    int64_t first_page, head_offset;

    KvReader(const AttentionCall &call, int32_t row, int32_t kv_head)
        : kv(call.kv), table(call.batch.tables + row * call.batch.table_stride),
          first_page(row_bounds(call.batch, row).base),
          head_offset((kv_head / call.kv.heads_per_group) * call.kv.group_stride +
                      (kv_head % call.kv.heads_per_group) * call.kv.head_stride) {}
    // Item offsets of the K vectors of tokens t0 ... t0 + n - 1 (V: + kv_stride).
    void offsets(int64_t t0, int64_t n, int64_t *out) const {
        int64_t page = t0 / kv.page_size - first_page, in_page = t0 % kv.page_size;
        for (int64_t i = 0; i < n; ++page, in_page = 0) {
            int64_t at = table[page] * kv.page_stride + head_offset + in_page * kv.token_stride;
            for (; in_page < kv.page_size && i < n; ++in_page, at += kv.token_stride) out[i++] = at;
        }
    }
};

template <class T> PHLOEM_INLINE void widen(const T *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(y + i, load(x + i));
    for (; i < n; ++i) y[i] = get(x + i);
}

template <class T> PHLOEM_INLINE void narrow(const float *x, T *y, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(y + i, load(x + i));
    for (; i < n; ++i) put(y + i, x[i]);
}

static void read_query(const phloem_attention_args &args, int64_t token, int64_t head, int64_t d,
                       float scale, float *out) {
    int64_t at = token * args.q_stride + head * d;
    if (args.q_dtype == PHLOEM_F32) widen((const float *)args.q + at, out, d);
    else widen((const uint16_t *)args.q + at, out, d);
    for (int64_t i = 0; i < d; ++i) out[i] *= scale;
}

// Scores s (n) -> top * tanh(s / softcap); n is a multiple of W.
static void bend_scores(float *s, int64_t n, float softcap, float top) {
    const float inverse = 1.0f / softcap;
    for (int64_t i = 0; i < n; i += W) store(s + i, top * vtanh(load(s + i) * inverse));
}

// o (d) are sums of p V with greatest score m and sum l: write o / l and the log-sum-exp.
static void write_output(const phloem_attention_args &args, int64_t token, int64_t head,
                         int64_t d, float *o, float m, float l) {
    if (args.sinks) {
        float sink = args.sinks[head], top = sink > m ? sink : m;
        float shrink = scalar_exp(m - top);
        for (int64_t i = 0; i < d; ++i) o[i] *= shrink;
        l = l * shrink + scalar_exp(sink - top);
        m = top;
    }
    float inverse = l != 0.0f ? 1.0f / l : 0.0f;
    for (int64_t i = 0; i < d; ++i) o[i] *= inverse;
    int64_t at = token * args.out_stride + head * d;
    if (args.out_dtype == PHLOEM_F32) narrow(o, (float *)args.out + at, d);
    else narrow(o, (uint16_t *)args.out + at, d);
    if (args.lse)
        args.lse[token * args.num_heads + head] = l != 0.0f ? m + logf(l) : -__builtin_inff();
}

// o: num_parts x (group, d), ml: num_parts x (group, 2). The first part is overwritten.
static void attention_merge(const AttentionCall &call, int32_t token, int32_t kv_head,
                            int64_t num_parts, const float *o, const float *ml) {
    const int64_t group = call.args.num_heads / call.kv.num_kv_heads, d = value_dim(call.kv);
    float *sum = const_cast<float *>(o);
    for (int64_t g = 0; g < group; ++g) {
        float m = -__builtin_inff(), l = 0.0f;
        for (int64_t p = 0; p < num_parts; ++p)
            if (ml[(p * group + g) * 2 + 1] != 0.0f) m = imax(m, ml[(p * group + g) * 2]);
        for (int64_t p = 0; p < num_parts; ++p) {
            const float *part = o + (p * group + g) * d;
            float lp = ml[(p * group + g) * 2 + 1];
            float weight = lp != 0.0f ? scalar_exp(ml[(p * group + g) * 2] - m) : 0.0f;
            l += lp * weight;
            for (int64_t c = 0; c < d; ++c)
                sum[g * d + c] = p == 0 ? part[c] * weight : sum[g * d + c] + part[c] * weight;
        }
        write_output(call.args, token, kv_head * group + g, d, sum + g * d, m, l);
    }
}

}  // namespace PHLOEM_NS
}  // namespace phloem
