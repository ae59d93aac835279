// Attention of a block of queries of one row, all heads of one KV head, against its context.
//
// Blocks of kBlock tokens pass in turn. Their rows of K and V are unpacked once for all queries;
// then for 16 queries (token by head) at a time: scores, weights, sums of values. Scores and sums
// lie transposed, S[token][16 queries] and O[number][16 queries]: softmax needs no horizontal step,
// and rows of K and V are read as they lie.
//
// At 64 numbers a block of K and V is 48 KiB as fp32, the queries and S of a panel 4 and 6: these
// stay in the first cache, the rest in the second one.
#pragma once
#include "attention.inl"
#include "gemm.inl"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kBlock = 96;  // tokens of K and V per step

// Scores and greatest scores are exponents of two.
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

struct TileScratch {
    int64_t d, d_even, dv, rp;  // dv: numbers of a value; rp: panels of 16 queries
    int64_t v_stride, total = 0;  // floats
    float *q, *o, *s, *k, *v, *m, *l, *rows;
    int32_t *pos;

    TileScratch(int64_t tokens, int64_t group, const phloem_kv_layer &kv, float *at = nullptr)
        : d(kv.head_dim), d_even((d + 1) / 2 * 2), dv(value_dim(kv)),
          rp((tokens * group + kPanel - 1) / kPanel), v_stride(is_latent(kv) ? d : dv) {
        const auto take = [&](int64_t floats) {
            float *begin = at ? at + total : at;
            total += (floats + kPanel - 1) / kPanel * kPanel;
            return begin;
        };
        q = take(rp * d_even * kPanel);
        o = take(rp * dv * kPanel);
        s = take(kBlock * kPanel);
        k = take(kBlock * d);
        v = is_latent(kv) ? k : take(kBlock * dv);  // latents: the first numbers of the keys
        m = take(rp * kPanel);
        l = take(rp * kPanel);
        rows = take(kPanel * imax(d, dv));
        pos = (int32_t *)take(rp * kPanel);
    }
};

static int64_t tile_scratch_floats(int64_t tokens, int64_t group, const phloem_kv_layer &kv) {
    return TileScratch(tokens, group, kv).total;
}

static void tile_load_queries(const AttentionCall &call, const TileItem &item, int64_t group,
                              TileScratch &t) {
    const int64_t rows = (item.tok1 - item.tok0) * group;
    // Those that are bent first become exponents afterwards.
    const float scale = call.args.scale * (call.args.softcap > 0 ? 1.0f : kLog2e);
    for (int64_t r = 0; r < t.rp * kPanel; ++r) {
        t.m[r] = -__builtin_inff();
        t.l[r] = 0.0f;
        const int64_t token = item.tok0 + imin(r, rows - 1) / group, at = r % kPanel;
        t.pos[r] = call.batch.positions[token];
        float *row = t.rows + at * t.d;
        if (r < rows)
            read_query(call.args, token, item.kv_head * group + r % group, t.d, scale, row);
        else
            memset(row, 0, sizeof(float) * t.d);
        if (at == kPanel - 1)
            transpose(t.rows, t.d, kPanel, t.d, t.q + r / kPanel * t.d_even * kPanel, kPanel);
    }
    memset(t.o, 0, sizeof(float) * t.rp * kPanel * t.dv);
}

// Where the rows of a block's tokens are: tokens lead ... n - 1 of those from t0 on.
struct TileRows {
    int64_t t0 = 0, lead = 0, n = 0;
    int64_t at[kBlock];

    void find(const KvReader &reader, int64_t block, const TileItem &item) {
        t0 = block;
        lead = imax<int64_t>(0, item.t0 - t0);
        n = imax<int64_t>(0, imin(kBlock, item.t1 - t0));
        if (n > lead) reader.offsets(t0 + lead, n - lead, at + lead);
    }
};

// As f32; other tokens are not read.
template <class R>
static void tile_load_block(const phloem_kv_layer &kv, const TileRows &rows, TileScratch &t) {
    const auto *base = (const typename R::Item *)kv.base;
    for (int64_t i = rows.lead; i < rows.n; ++i) {
        unpack_row<R>(kv, base + rows.at[i], t.k + i * t.d);
        if (t.v != t.k) unpack<R>(base + rows.at[i] + kv.kv_stride, t.dv, 0, t.dv, t.v + i * t.dv);
    }
}

// The rows of the block after this one, asked for while this one is multiplied.
struct TileAhead {
    const char *base;
    const TileRows &rows;
    int64_t item_bytes, key_bytes, value_bytes, value_at, step, next;

    // step: rows at a time, so that all of them are asked for if that happens `times`.
    TileAhead(const phloem_kv_layer &kv, const TileRows &later, int64_t times)
        : base((const char *)kv.base), rows(later),
          item_bytes(is_packed(kv.dtype) ? 1 : dtype_bytes(kv.dtype)),
          key_bytes(item_bytes * row_items(kv)),
          value_bytes(is_latent(kv) ? 0 : item_bytes * part_items(kv.dtype, value_dim(kv))),
          value_at(item_bytes * kv.kv_stride), step(ceil_div(kBlock, times)), next(later.lead) {}
    static void lines(const char *from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
    }
    void ask() {
        for (int64_t i = 0; i < step && next < rows.n; ++i, ++next) {
            const char *row = base + rows.at[next] * item_bytes;
            lines(row, key_bytes);
            lines(row + value_at, value_bytes);
        }
    }
};

// What the 16 queries of a panel see of a block: tokens lead ... n - 1 of those from t0 on.
struct PanelView {
    const int32_t *pos;
    int64_t t0, lead, n;
    int32_t window, read_from;

    PanelView(const AttentionCall &call, const int32_t *positions, int64_t block, int64_t size,
              int64_t first)
        : pos(positions), t0(block), window(call.args.window), read_from((int32_t)first) {
        n = imin(size, pos[kPanel - 1] - t0 + 1);  // positions grow
        lead = imax<int64_t>(0, first_of(pos[0]) - t0);
    }
    int64_t first_of(int64_t position) const {
        return window > 0 ? imax<int64_t>(read_from, position - window + 1) : read_from;
    }
    // Some query does not see all of it.
    bool ragged() const {
        return t0 + n - 1 > pos[0] || first_of(pos[kPanel - 1]) > t0 + lead;
    }
};

// One panel's running softmax over a block. Scores in s are relative to `base`, what they were
// relative to when the block began: m, or 0 before the first block.
struct PanelSoftmax {
    float *s, *m, *l;
    alignas(64) float base[kPanel], from[kPanel], top[kPanel], shift[kPanel], shrink[kPanel];
};

// s (MR tokens, 16) = from + K q, and the greatest of each query so far.
template <int MR>
static void scores_of(const float *k, int64_t k_stride, const float *q, int64_t d,
                      const float *from, float *s, float *top) {
    vf acc[MR][NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) acc[i][j] = load(from + j * W);
    int64_t c = 0;
    for (; c + 2 <= d; c += 2, q += 2 * kPanel) {
        step<float, MR, 1, ROWS, 0>(k, k_stride, q, 0, c, acc);
        step<float, MR, 1, ROWS, 1>(k, k_stride, q, 0, c + 1, acc);
    }
    if (c < d) step<float, MR, 1, ROWS, 0>(k, k_stride, q, 0, c, acc);
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
        vf most = load(top + j * W);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            most = vmax(acc[i][j], most);
            store(s + i * kPanel + j * W, acc[i][j]);
        }
        store(top + j * W, most);
    }
}

// For a number of tokens known only at run time, 1 <= tokens <= kMR.
template <int MR = kMR>
PHLOEM_INLINE void scores_of_tokens(int64_t tokens, const float *k, int64_t k_stride,
                                    const float *q, int64_t d, const float *from, float *s,
                                    float *top) {
    if constexpr (MR > 1) {
        if (tokens < MR) {
            scores_of_tokens<MR - 1>(tokens, k, k_stride, q, d, from, s, top);
            return;
        }
    }
    scores_of<MR>(k, k_stride, q, d, from, s, top);
}

// f(first, rows) for rows first ... first + rows - 1 of n, at most kMR of them and about as many.
template <class F> PHLOEM_INLINE void even_rows(int64_t n, const F &f) {
    int64_t parts = (n + kMR - 1) / kMR;
    for (int64_t i = 0, rows = 0; i < n; i += rows, --parts) {
        rows = (n - i + parts - 1) / parts;
        f(i, rows);
    }
}

// Scores become relative to base if they are not (`bent`), -inf where a query must not see the
// token; top is made anew.
static void mask_scores(const PanelView &view, bool bent, PanelSoftmax &x) {
    const vf minus_inf = set1(-__builtin_inff());
    for (int v = 0; v < NV; ++v) {
        vi last;
        memcpy(&last, view.pos + v * W, sizeof last);
        vi first = vi{} + view.read_from;
        if (view.window > 0) {
            vi oldest = last - (view.window - 1);
            first = oldest > first ? oldest : first;
        }
        const vf base = bent ? load(x.base + v * W) : vf{};
        vf top = minus_inf;
        for (int64_t i = view.lead; i < view.n; ++i) {
            float *at = x.s + i * kPanel + v * W;
            const vi token = vi{} + (int32_t)(view.t0 + i);
            const vf score = select((token <= last) & (token >= first), load(at) - base, minus_inf);
            store(at, score);
            top = vmax(score, top);
        }
        store(x.top + v * W, top);
    }
}

// A query's m grows by at least this, a factor of 2^8, so that its sums seldom have to shrink.
constexpr float kSlack = 8.0f;

// m for the scores that are known now: `shift` is what it grows by and `shrink` what the sums so
// far are to be multiplied with. False: by 1, all of them.
static bool grow_top(PanelSoftmax &x) {
    const vf minus_inf = set1(-__builtin_inff());
    vi any = {};
    for (int v = 0; v < NV; ++v) {
        const vf old = load(x.m + v * W), top = load(x.top + v * W), base = load(x.base + v * W);
        const vi grows = top > (old == minus_inf ? minus_inf : set1(kSlack));
        const vf now = grows ? base + top : old;
        store(x.m + v * W, now);
        store(x.shift + v * W, grows ? top : vf{});
        store(x.shrink + v * W, grows ? vexp2(old - now) : set1(1.0f));
        any |= grows;
    }
    int32_t grown = 0;
    for (int i = 0; i < W; ++i) grown |= any[i];
    return grown != 0;
}

// Scores of n tokens become weights.
template <bool SHIFT> static void make_weights(float *s, int64_t n, const PanelSoftmax &x) {
    vf shift[NV], sum[NV];
    for (int v = 0; v < NV; ++v) {
        shift[v] = load(x.shift + v * W);
        sum[v] = load(x.l + v * W) * load(x.shrink + v * W);
    }
    for (int64_t i = 0; i < n; ++i)
        for (int v = 0; v < NV; ++v) {
            float *at = s + i * kPanel + v * W;
            vf p = vexp2(SHIFT ? load(at) - shift[v] : load(at));
            store(at, p);
            sum[v] += p;
        }
    for (int v = 0; v < NV; ++v) store(x.l + v * W, sum[v]);
}

static void begin_softmax(PanelSoftmax &x, bool bent) {
    const vf minus_inf = set1(-__builtin_inff());
    for (int v = 0; v < NV; ++v) {
        const vf m = load(x.m + v * W), base = m == minus_inf ? vf{} : m;
        store(x.base + v * W, base);
        store(x.from + v * W, bent ? vf{} : -base);
        store(x.top + v * W, minus_inf);
    }
}

static void tile_panel(const AttentionCall &call, const PanelView &view, const TileScratch &t,
                       int64_t panel, TileAhead &ahead) {
    const bool bent = call.args.softcap > 0;
    const int64_t n = view.n - view.lead;
    const float *q = t.q + panel * t.d_even * kPanel;
    const float *k = t.k + view.lead * t.d, *v = t.v + view.lead * t.v_stride;
    float *o = t.o + panel * t.dv * kPanel, *s = t.s + view.lead * kPanel;
    PanelSoftmax x;
    x.s = t.s;
    x.m = t.m + panel * kPanel;
    x.l = t.l + panel * kPanel;
    begin_softmax(x, bent);
    even_rows(n, [&](int64_t i, int64_t tokens) {
        scores_of_tokens(tokens, k + i * t.d, t.d, q, t.d, x.from, s + i * kPanel, x.top);
        ahead.ask();
    });
    if (bent) bend_scores(s, n * kPanel, call.args.softcap, call.args.softcap * kLog2e);
    if (bent || view.ragged()) mask_scores(view, bent, x);
    if (grow_top(x)) {
        make_weights<true>(s, n, x);
        for (int64_t c = 0; c < t.dv * kPanel; c += kPanel)
            for (int i = 0; i < kPanel; i += W)
                store(o + c + i, load(o + c + i) * load(x.shrink + i));
    } else {
        make_weights<false>(s, n, x);
    }
    even_rows(t.dv, [&](int64_t c, int64_t rows) {
        micro_rows<float, 1, COLUMNS, true>(rows, v + c, t.v_stride, s, 0, n, o + c * kPanel,
                                            kPanel, 0);
    });
}

static void tile_block(const AttentionCall &call, const TileRows &rows, const TileRows &later,
                       int64_t read_from, const TileScratch &t) {
    TileAhead ahead(call.kv, later, t.rp * (kBlock / kMR));
    for (int64_t p = 0; p < t.rp; ++p) {
        const PanelView view(call, t.pos + p * kPanel, rows.t0, rows.n, read_from);
        if (view.n > view.lead) tile_panel(call, view, t, p, ahead);
    }
}

// What a tile has seen goes to the output, or, where the context is cut in parts, to o (rows, dv)
// and ml (rows, 2), not divided.
template <class Scratch>
static void tile_results(const AttentionCall &call, const TileItem &item, int64_t group,
                         const Scratch &t, float *o, float *ml) {
    for (int64_t r = 0; r < (item.tok1 - item.tok0) * group; ++r) {
        const int64_t at = r % kPanel;
        if (at == 0)
            transpose(t.o + r / kPanel * t.dv * kPanel, kPanel, t.dv, kPanel, t.rows, t.dv);
        float *row = t.rows + at * t.dv, m = t.m[r] * kLn2;
        if (!o) {
            write_output(call.args, item.tok0 + r / group, item.kv_head * group + r % group, t.dv,
                         row, m, t.l[r]);
            continue;
        }
        memcpy(o + r * t.dv, row, sizeof(float) * t.dv);
        ml[2 * r] = m;
        ml[2 * r + 1] = t.l[r];
    }
}

static void attention_tile(const AttentionCall &call, const TileItem &item, float *o, float *ml,
                           float *scratch) {
    const int64_t group = call.args.num_heads / call.kv.num_kv_heads;
    TileScratch t(item.tok1 - item.tok0, group, call.kv, scratch);
    tile_load_queries(call, item, group, t);
    const KvReader reader(call, item.row, item.kv_head);
    const int64_t read_from = row_bounds(call.batch, item.row).read_from;
    TileRows blocks[2], *rows = &blocks[0], *later = &blocks[1];
    // Blocks lie at multiples of kBlock: a query's sums do not depend on how its row is chunked.
    rows->find(reader, item.t0 / kBlock * kBlock, item);
    while (rows->n > 0) {
        later->find(reader, rows->t0 + kBlock, item);
        with_rows(call.kv,
                  [&](auto format) { tile_load_block<decltype(format)>(call.kv, *rows, t); });
        tile_block(call, *rows, *later, read_from, t);
        TileRows *done = rows;
        rows = later;
        later = done;
    }
    tile_results(call, item, group, t, o, ml);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
