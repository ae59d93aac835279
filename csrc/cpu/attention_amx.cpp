// Attention of a block of queries of one row with AMX tiles, as attention_tile.inl does it with
// multiply-adds: scores and sums transposed, S[token][16 queries] and O[number][16 queries].
//
//     S = K Q^T      K as it lies in pages, 16 tokens by 32 numbers a tile; Q rounded to bf16
//     O += V^T P^T   P, the weights, rounded to bf16; V of a block turned once for all queries
//
// A tile of the right side holds pairs: [number / 2][16 queries][2] of Q, [token / 2][16][2] of P.
// So two rows of S become a row of P^T by rounding, and nothing has to be turned for it. Sums are
// fp32 and are taken block after block, lane by lane: what a query gets depends on nothing but the
// tokens it sees.
//
// Compiled for AVX-512 (for AVX2 with PHLOEM_EMULATE): the exponents are most of the work.
#include "attention_amx.h"

#include "amx_rows.inl"

namespace phloem {
namespace PHLOEM_NS {

// Tile D of Q: those of the first four stay in 4 ... 7 for a whole panel.
template <int D> PHLOEM_INLINE void amx_query_tiles(const uint16_t *q, int depth) {
    if constexpr (D < 4) {
        if (D < depth) tile_load<4 + D>(q + D * kTileNumbers, kTileBytes);
        amx_query_tiles<D + 1>(q, depth);
    }
}

// Sums 0 and 1 += tiles D of two tiles of tokens times Q's.
template <int D, int DEPTH, bool BOTH>
PHLOEM_INLINE void amx_key_tiles(const uint16_t *k) {
    if constexpr (D < DEPTH) {
        tile_load<2>(k + D * kTileNumbers, kTileBytes);
        tile_dot<0, 2, 4 + D>();
        if (BOTH) {
            tile_load<3>(k + (DEPTH + D) * kTileNumbers, kTileBytes);
            tile_dot<1, 3, 4 + D>();
        }
        amx_key_tiles<D + 1, DEPTH, BOTH>(k);
    }
}

// The same for any depth, with Q's tiles in turn.
template <bool BOTH>
PHLOEM_INLINE void amx_deep_tiles(const uint16_t *q, const uint16_t *k, int64_t depth) {
    for (int64_t c = 0; c < depth; ++c, k += kTileNumbers) {
        tile_load<4>(q + c * kTileNumbers, kTileBytes);
        tile_load<2>(k, kTileBytes);
        tile_dot<0, 2, 4>();
        if (BOTH) {
            tile_load<3>(k + depth * kTileNumbers, kTileBytes);
            tile_dot<1, 3, 4>();
        }
    }
}

template <int DEPTH, bool BOTH>
PHLOEM_INLINE void amx_score_rows(const uint16_t *q, const uint16_t *k, int64_t depth, float *s) {
    tile_zero<0>();
    if (BOTH) tile_zero<1>();
    if constexpr (DEPTH > 0) amx_key_tiles<0, DEPTH, BOTH>(k);
    else amx_deep_tiles<BOTH>(q, k, depth);
    tile_store<0>(s, kTileBytes);
    if (BOTH) tile_store<1>(s + kTileRows * kPanel, kTileBytes);
}

// DEPTH: tiles of a row, or 0 for any number.
template <int DEPTH>
static void amx_scores_of(const AmxScratch &t, const uint16_t *q, int64_t first, int64_t n,
                          float *s) {
    const int64_t depth = t.d / kDepth, tile = depth * kTileNumbers;
    const uint16_t *k = t.k + first / kTileRows * tile;
    amx_query_tiles<0>(q, DEPTH);
    int64_t i = first;
    s += i * kPanel;
    for (; i + kTileRows < n; i += 2 * kTileRows, k += 2 * tile, s += 2 * kTileRows * kPanel)
        amx_score_rows<DEPTH, true>(q, k, depth, s);
    if (i < n) amx_score_rows<DEPTH, false>(q, k, depth, s);
}

// Rows first ... of s, up to whole tiles of n.
static void amx_scores(const AmxScratch &t, const uint16_t *q, int64_t first, int64_t n, float *s) {
    switch (t.d / kDepth) {
        case 1: return amx_scores_of<1>(t, q, first, n, s);
        case 2: return amx_scores_of<2>(t, q, first, n, s);
        case 3: return amx_scores_of<3>(t, q, first, n, s);
        case 4: return amx_scores_of<4>(t, q, first, n, s);
        default: return amx_scores_of<0>(t, q, first, n, s);
    }
}

// f<I>() for I below N.
template <int I, int N, class F> PHLOEM_INLINE void each(const F &f) {
    if constexpr (I < N) {
        f.template operator()<I>();
        each<I + 1, N>(f);
    }
}

struct LoadSums {
    const float *o;
    template <int I> inline __attribute__((always_inline)) void operator()() const {
        tile_load<I>(o + I * kTileRows * kPanel, kTileBytes);
    }
};
struct StoreSums {
    float *o;
    template <int I> inline __attribute__((always_inline)) void operator()() const {
        tile_store<I>(o + I * kTileRows * kPanel, kTileBytes);
    }
};
struct AddValues {
    const uint16_t *v;
    template <int I> inline __attribute__((always_inline)) void operator()() const {
        constexpr int kTile = 5 + I % 3;
        tile_load<kTile>(v + I * kTileNumbers, kTileBytes);
        tile_dot<I, kTile, 4>();
    }
};

// N tiles of O of a panel += those of V^T times P^T, over whole groups of 32 tokens.
template <int N>
static void amx_values_of(const uint16_t *v, int64_t group, const uint16_t *p, int64_t groups,
                          float *o) {
    each<0, N>(LoadSums{o});
    for (int64_t i = 0; i < groups; ++i, v += group, p += kTileNumbers) {
        tile_load<4>(p, kTileBytes);
        each<0, N>(AddValues{v});
    }
    each<0, N>(StoreSums{o});
}

static void amx_values(const AmxScratch &t, const uint16_t *p, float *o, int64_t first,
                       int64_t end) {
    const int64_t group = t.dv * kDepth, groups = (end - first) / kDepth;
    const uint16_t *v = t.v + first * t.dv;
    p += first * kPanel;
    int64_t tiles = t.dv / kTileRows;
    for (; tiles >= 4; tiles -= 4, v += 4 * kTileNumbers, o += 4 * kTileRows * kPanel)
        amx_values_of<4>(v, group, p, groups, o);
    if (tiles > 0) amx_values_of<2>(v, group, p, groups, o);
}

// 2^x for x <= kSlack, or a NaN; relative error below 2e-4, far less than rounding to bf16 costs.
PHLOEM_INLINE vf rough_exp2(vf x) {
#if defined(__AVX512DQ__)
    // x - floor(x), 0 for an infinity; then times 2^floor(x).
    vf r = _mm512_reduce_ps(x, 1);
    vf p = fma(fma(fma(set1(7.8024521e-2f), r, set1(2.2606716e-1f)), r, set1(6.9583354e-1f)), r,
               set1(9.9992522e-1f));
    return _mm512_scalef_ps(p, x);
#else
    const vf magic = set1(12582912.0f + 127.0f);
    vf c = vmax(set1(-127.0f), x);
    vf t = c + magic;
    vf r = c - (t - magic);
    vf p = fma(fma(fma(set1(5.5171669e-2f), r, set1(2.4261112e-1f)), r, set1(6.9325677e-1f)), r,
               set1(9.9992807e-1f));
    return p * (vf)((vi)t << 23);
#endif
}

// Half up: a weight is not negative, and what is between two numbers need not go to the even one.
PHLOEM_INLINE vu rounded_bits(vf x) { return (vu)x + 0x8000u; }

// S of a panel becomes P; what it has of sums shrinks if its greatest score has grown much.
struct AmxSoftmax {
    const AmxScratch &t;
    const PanelView &view;
    float *s;
    uint16_t *weights;
    int64_t panel, first, end;  // rows of s that hold scores
    float factor;               // of scores, to exponents of two

    // Scores that a query must not see, and rows that are in a tile only, become -inf.
    void mask(int v) const {
        const vf minus_inf = set1(-__builtin_inff());
        vi last;
        memcpy(&last, view.pos + v * W, sizeof last);
        vi oldest = vi{} + view.read_from;
        if (view.window > 0) {
            const vi low = last - (view.window - 1);
            oldest = low > oldest ? low : oldest;
        }
        const vi end_of_block = vi{} + (int32_t)(view.t0 + view.n - 1);
        last = last < end_of_block ? last : end_of_block;
        for (int64_t i = first; i < end; ++i) {
            float *at = s + i * kPanel + v * W;
            const vi token = vi{} + (int32_t)(view.t0 + i);
            store(at, select((token <= last) & (token >= oldest), load(at), minus_inf));
        }
    }

    vf greatest(int v) const {
        vf most[4];
        for (vf &x : most) x = set1(-__builtin_inff());
        for (int64_t i = first; i < end; i += 4)  // whole tiles
            for (int j = 0; j < 4; ++j) most[j] = vmax(load(s + (i + j) * kPanel + v * W), most[j]);
        return vmax(vmax(most[0], most[1]), vmax(most[2], most[3]));
    }

    // The new reference of each query; where it has grown, sums so far shrink.
    vf follow(int v) const {
        float *m = t.m + panel * kPanel + v * W, *l = t.l + panel * kPanel + v * W;
        const vf minus_inf = set1(-__builtin_inff());
        const vf old = load(m), top = greatest(v) * factor;
        const vi grows = top > (old == minus_inf ? minus_inf : old + kSlack);
        const vf now = grows ? top : old;
        int32_t any = 0;
        for (int i = 0; i < W; ++i) any |= grows[i];
        if (any) {
            const vf shrink = grows ? vexp2(old - now) : set1(1.0f);
            store(m, now);
            store(l, load(l) * shrink);
            float *o = t.o + panel * t.dv * kPanel + v * W;
            for (int64_t c = 0; c < t.dv; ++c) store(o + c * kPanel, load(o + c * kPanel) * shrink);
        }
        return now == minus_inf ? vf{} : now;
    }

    void weigh(int v, vf m) const {
        float *l = t.l + panel * kPanel + v * W;
        vf sums[2] = {load(l), vf{}};
        for (int64_t i = first; i < end; i += 2) {
            const float *at = s + i * kPanel + v * W;
            const vf even = rough_exp2(fma(load(at), set1(factor), -m));
            const vf odd = rough_exp2(fma(load(at + kPanel), set1(factor), -m));
            sums[0] += even;
            sums[1] += odd;
            const vu pair = rounded_bits(even) >> 16 | (rounded_bits(odd) & 0xffff0000u);
            memcpy(weights + i * kPanel + 2 * v * W, &pair, sizeof pair);
        }
        store(l, sums[0] + sums[1]);
    }

    void run(bool masked) const {
        for (int v = 0; v < NV; ++v) {
            if (masked) mask(v);
            weigh(v, follow(v));
        }
    }
};

// A panel before a block: what its queries see of it, in whole groups of 32 tokens.
struct AmxPanel {
    PanelView view;
    int64_t panel, first, end;

    AmxPanel(const AttentionCall &call, const AmxScratch &t, int64_t p, const AmxRows &rows,
             int64_t read_from)
        : view(call, t.pos + p * kPanel, rows.t0, rows.n, read_from), panel(p),
          first(view.lead / kDepth * kDepth), end(ceil_div(view.n, kDepth) * kDepth) {}
    bool sees() const { return view.n > view.lead; }
    float *scores(const AmxScratch &t) const { return t.s + panel % 2 * kAmxBlock * kPanel; }

    uint16_t *weights(const AmxScratch &t) const { return t.p + panel % 2 * kAmxBlock * kPanel; }

    void score(const AmxScratch &t) const {
        if (sees()) amx_scores(t, t.q + panel * t.d * kPanel, first, view.n, scores(t));
    }
    void add(const AmxScratch &t) const {
        if (sees()) amx_values(t, weights(t), t.o + panel * t.dv * kPanel, first, end);
    }
    void weigh(const AttentionCall &call, const AmxScratch &t) const {
        if (!sees()) return;
        float *s = scores(t), factor = call.args.scale * kLog2e;
        const int64_t scored = ceil_div(view.n, kTileRows) * kTileRows;
        if (scored < end) memset(s + scored * kPanel, 0, sizeof(float) * (end - scored) * kPanel);
        if (call.args.softcap > 0) {
            const float inverse = call.args.scale / call.args.softcap;
            for (int64_t i = first * kPanel; i < end * kPanel; i += W)
                store(s + i, vtanh(load(s + i) * inverse));
            factor = call.args.softcap * kLog2e;
        }
        const bool masked = view.ragged() || first < view.lead || end > view.n;
        AmxSoftmax{t, view, s, weights(t), panel, first, end, factor}.run(masked);
    }
};

// A tile cannot be loaded before what was just stored there has left for the cache: so between two
// things that happen to a panel, something happens to others.
static void amx_block(const AttentionCall &call, const AmxScratch &t, const AmxRows &rows,
                      int64_t read_from) {
    const auto panel = [&](int64_t p) { return AmxPanel(call, t, p, rows, read_from); };
    panel(0).score(t);
    for (int64_t p = 0; p <= t.rp; ++p) {
        if (p + 1 < t.rp) panel(p + 1).score(t);
        if (p > 0) panel(p - 1).add(t);
        if (p < t.rp) panel(p).weigh(call, t);
    }
}

static void amx_tile(const AttentionCall &call, const TileItem &item, float *o, float *ml,
                     float *scratch) {
    const int64_t group = call.args.num_heads / call.kv.num_kv_heads;
    AmxScratch t(item.tok1 - item.tok0, group, call.kv, scratch);
    amx_load_queries(call, item, group, t);
    const KvReader reader(call, item.row, item.kv_head);
    const int64_t read_from = row_bounds(call.batch, item.row).read_from;
    TileConfig config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = kTileBytes;
        config.rows[i] = kTileRows;
    }
    tiles_begin(config);
    AmxRows rows;
    // Blocks lie at multiples of kAmxBlock: a query's sums do not depend on how its row is chunked.
    for (int64_t block = item.t0 / kAmxBlock * kAmxBlock; block < item.t1; block += kAmxBlock) {
        rows.find(reader, block, item);
        amx_load_keys(rows, t);
        amx_load_values(rows, call.kv.kv_stride, t);
        amx_block(call, t, rows, read_from);
    }
    tiles_end();
    tile_results(call, item, group, t, o, ml);
}

}  // namespace PHLOEM_NS

const AmxAttention kAmxAttention = {PHLOEM_NS::amx_fits, PHLOEM_NS::amx_scratch_floats,
                                    PHLOEM_NS::amx_tile, PHLOEM_NS::kAmxBlock};

}  // namespace phloem
