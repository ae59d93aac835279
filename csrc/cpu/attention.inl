// Attention over pages, read in place through the page table.
//
// tile: a block of queries of one row (all heads of one KV head) against blocks of kBlock tokens.
//   Scores are kept transposed, S[token][16 query rows], so that softmax needs no horizontal step
//   and P is ready as the left side of P V without a transpose.
//   Where the context is cut in parts, so that all threads work on one token, parts are merged.
//
// Positions that a query must not see are masked by selection, never by a product, and positions
// beyond the last query (or before every window) are never read: their slots may hold NaN.
//
// Packed rows are read as they lie (rows.inl): a tile unpacks each row once for all its queries.
#pragma once
#include <math.h>

#include "gemm.inl"
#include "rows.inl"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kBlock = 96;  // tokens of K and V per step

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
                       float *out) {
    int64_t at = token * args.q_stride + head * d;
    if (args.q_dtype == PHLOEM_F32) widen((const float *)args.q + at, out, d);
    else widen((const uint16_t *)args.q + at, out, d);
    for (int64_t i = 0; i < d; ++i) out[i] *= args.scale;
}

// Scores s (n) -> softcap * tanh(s / softcap); n is a multiple of W.
static void bend_scores(float *s, int64_t n, float softcap) {
    const float inverse = 1.0f / softcap;
    for (int64_t i = 0; i < n; i += W) store(s + i, softcap * vtanh(load(s + i) * inverse));
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

struct TileScratch {
    int64_t d, d_even, dv, dp, rp;  // dv: numbers of a value, dp: its panels; rp: of query rows
    int64_t total;                  // floats
    float *q, *o, *s, *k, *v, *m, *l;
    int32_t *pos;

    TileScratch(int64_t tokens, int64_t group, const phloem_kv_layer &kv)
        : d(kv.head_dim), d_even((d + 1) / 2 * 2), dv(value_dim(kv)),
          dp((dv + kPanel - 1) / kPanel), rp((tokens * group + kPanel - 1) / kPanel),
          total(rp * kPanel * (d_even + dp * kPanel + kBlock + 3) + k_floats() +
                dp * kBlock * kPanel) {}
    int64_t k_floats() const { return (kBlock * d + kPanel - 1) / kPanel * kPanel; }
    void place(float *at) {
        q = at;
        o = q + rp * d_even * kPanel;
        s = o + rp * kPanel * dp * kPanel;
        k = s + rp * kBlock * kPanel;
        v = k + k_floats();
        m = v + dp * kBlock * kPanel;
        l = m + rp * kPanel;
        pos = (int32_t *)(l + rp * kPanel);
    }
};

static int64_t tile_scratch_floats(int64_t tokens, int64_t group, const phloem_kv_layer &kv) {
    return TileScratch(tokens, group, kv).total;
}

static void tile_load_queries(const AttentionCall &call, const TileItem &item, int64_t group,
                              TileScratch &t) {
    const int64_t rows = (item.tok1 - item.tok0) * group;
    for (int64_t r = 0; r < t.rp * kPanel; ++r) {
        float *q = t.q + (r / kPanel) * t.d_even * kPanel + r % kPanel;
        t.m[r] = -__builtin_inff();
        t.l[r] = 0.0f;
        int64_t token = item.tok0 + imin(r, rows - 1) / group;
        t.pos[r] = call.batch.positions[token];
        if (r >= rows) {
            for (int64_t i = 0; i < t.d; ++i) q[i * kPanel] = 0.0f;
            continue;
        }
        float *row = t.k;  // free until the first block
        read_query(call.args, token, item.kv_head * group + r % group, t.d, row);
        for (int64_t i = 0; i < t.d; ++i) q[i * kPanel] = row[i];
    }
    memset(t.o, 0, sizeof(float) * t.rp * kPanel * t.dp * kPanel);
}

// K as f32 rows, V as f32 panels; tokens outside first..last-1 are not read and become zeros.
template <class R>
static void tile_load_block(const KvReader &reader, int64_t t0, int64_t first, int64_t last,
                            TileScratch &t) {
    int64_t at[kBlock];
    const int64_t lead = imax<int64_t>(0, first - t0), n = imin(kBlock, last - t0);
    const auto *base = (const typename R::Item *)reader.kv.base;
    const bool latent = is_latent(reader.kv);
    reader.offsets(t0 + lead, n - lead, at + lead);
    for (int64_t i = 0; i < n; ++i) {
        float *k = t.k + i * t.d;
        if (i < lead) {
            for (int64_t c = 0; c < t.d; ++c) k[c] = 0.0f;
            for (int64_t p = 0; p < t.dp; ++p)
                for (int64_t c = 0; c < kPanel; ++c) t.v[(p * kBlock + i) * kPanel + c] = 0.0f;
            continue;
        }
        unpack_row<R>(reader.kv, base + at[i], k);
        const auto *v = base + at[i] + reader.kv.kv_stride;
        for (int64_t p = 0; p < t.dp; ++p) {
            float *out = t.v + (p * kBlock + i) * kPanel;
            int64_t width = imin<int64_t>(kPanel, t.dv - p * kPanel);
            if (latent) widen(k + p * kPanel, out, width);
            else unpack<R>(v, t.dv, p * kPanel, width, out);
            for (int64_t c = width; c < kPanel; ++c) out[c] = 0.0f;
        }
    }
}

// Scores of n tokens in s (n, 16) become weights; returns in alpha what earlier sums shrink by.
// MASK: some of the tokens lie outside some row's reach.
template <bool MASK>
static void tile_softmax(float *s, int64_t n, int64_t t0, int32_t window, int32_t read_from,
                         const int32_t *pos, float *m, float *l, float *alpha) {
    const vf minus_inf = set1(-__builtin_inff());
    for (int v = 0; v < NV; ++v) {
        vi last;
        memcpy(&last, pos + v * W, sizeof last);
        vi first = vi{} + read_from;
        if (window > 0) {
            vi oldest = last - (window - 1);
            first = oldest > first ? oldest : first;
        }
        vf top = minus_inf;
        for (int64_t i = 0; i < n; ++i) {
            float *at = s + i * kPanel + v * W;
            vf x = load(at);
            if (MASK) {
                vi token = vi{} + (int32_t)(t0 + i);
                x = select((token <= last) & (token >= first), x, minus_inf);
                store(at, x);
            }
            top = vmax(x, top);
        }
        vf old = load(m + v * W), now = vmax(old, top);
        vf base = now == minus_inf ? vf{} : now;
        vf shrink = vexp(old - base), sum = load(l + v * W) * shrink;
        for (int64_t i = 0; i < n; ++i) {
            vf p = vexp(load(s + i * kPanel + v * W) - base);
            store(s + i * kPanel + v * W, p);
            sum += p;
        }
        store(m + v * W, now);
        store(l + v * W, sum);
        store(alpha + v * W, shrink);
    }
}

static void tile_block(const AttentionCall &call, int64_t t0, int64_t n, int64_t read_from,
                       TileScratch &t) {
    const int32_t window = call.args.window;
    alignas(64) float alpha[kPanel];
    for (int64_t p = 0; p < t.rp; ++p) {
        float *s = t.s + p * kBlock * kPanel, *o = t.o + p * kPanel * t.dp * kPanel;
        const int32_t *pos = t.pos + p * kPanel;
        // Positions grow: no row of the panel sees the block.
        if (t0 > pos[kPanel - 1] || (window > 0 && t0 + n <= pos[0] - window + 1)) continue;
        const float *q = t.q + p * t.d_even * kPanel;
        for (int64_t i = 0; i < n; i += kMR)
            micro_rows<float, 1, ROWS, false>(imin<int64_t>(kMR, n - i), t.k + i * t.d, t.d, q, 0,
                                              t.d, s + i * kPanel, kPanel, 0);
        if (call.args.softcap > 0) bend_scores(s, n * kPanel, call.args.softcap);
        bool mask = t0 + n - 1 > pos[0] || t0 < read_from ||
                    (window > 0 && t0 <= pos[kPanel - 1] - window);
        float *m = t.m + p * kPanel, *l = t.l + p * kPanel;
        if (mask) tile_softmax<true>(s, n, t0, window, (int32_t)read_from, pos, m, l, alpha);
        else tile_softmax<false>(s, n, t0, window, 0, pos, m, l, alpha);
        for (int64_t r = 0; r < kPanel; ++r) {
            if (alpha[r] == 1.0f) continue;
            for (int64_t c = 0; c < t.dp * kPanel; c += W)
                store(o + r * t.dp * kPanel + c, load(o + r * t.dp * kPanel + c) * alpha[r]);
        }
        for (int64_t r = 0; r < kPanel; r += kMR)
            for (int64_t c = 0; c < t.dp; ++c)
                micro_rows<float, 1, COLUMNS, true>(
                    imin<int64_t>(kMR, kPanel - r), s + r, kPanel, t.v + c * kBlock * kPanel, 0, n,
                    o + r * t.dp * kPanel + c * kPanel, t.dp * kPanel, 0);
    }
}

// What a tile has seen goes to the output, or, where the context is cut in parts, to o (rows, dv)
// and ml (rows, 2), not divided.
static void tile_results(const AttentionCall &call, const TileItem &item, int64_t group,
                         const TileScratch &t, float *o, float *ml) {
    for (int64_t r = 0; r < (item.tok1 - item.tok0) * group; ++r) {
        float *sums = t.o + r * t.dp * kPanel;
        if (!o) {
            write_output(call.args, item.tok0 + r / group, item.kv_head * group + r % group, t.dv,
                         sums, t.m[r], t.l[r]);
            continue;
        }
        memcpy(o + r * t.dv, sums, sizeof(float) * t.dv);
        ml[2 * r] = t.m[r];
        ml[2 * r + 1] = t.l[r];
    }
}

static void attention_tile(const AttentionCall &call, const TileItem &item, float *o, float *ml,
                           float *scratch) {
    const int64_t group = call.args.num_heads / call.kv.num_kv_heads;
    TileScratch t(item.tok1 - item.tok0, group, call.kv);
    t.place(scratch);
    tile_load_queries(call, item, group, t);
    const KvReader reader(call, item.row, item.kv_head);
    const int64_t read_from = row_bounds(call.batch, item.row).read_from;
    // Blocks lie at multiples of kBlock: a query's sums do not depend on how its row is chunked.
    for (int64_t t0 = item.t0 / kBlock * kBlock; t0 < item.t1; t0 += kBlock) {
        with_rows(call.kv, [&](auto rows) {
            tile_load_block<decltype(rows)>(reader, t0, item.t0, item.t1, t);
        });
        tile_block(call, t0, imin(kBlock, item.t1 - t0), read_from, t);
    }
    tile_results(call, item, group, t, o, ml);
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
