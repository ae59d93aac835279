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

#include "attention_tile.inl"
#include "tiles.h"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kAmxBlock = 128;   // tokens of K and V per step
constexpr int64_t kDepth = 32;       // numbers that a tile multiplies away
constexpr int64_t kTileNumbers = kTileRows * kDepth;  // bf16 of a tile, 1 KiB
constexpr int64_t kMostDim = 256;

struct AmxScratch {
    int64_t d, dv, rp, total = 0;  // as in TileScratch
    float *o, *s, *m, *l, *rows;
    uint16_t *q, *p, *k, *v;       // tiles, one after another
    uint32_t *pairs;
    int32_t *pos;

    AmxScratch(int64_t tokens, int64_t group, const phloem_kv_layer &kv, float *at = nullptr)
        : d(kv.head_dim), dv(value_dim(kv)), rp(ceil_div(tokens * group, kPanel)) {
        const auto take = [&](int64_t floats) {
            float *begin = at ? at + total : at;
            total += ceil_div(floats, kPanel) * kPanel;
            return begin;
        };
        o = take(rp * dv * kPanel);
        s = take(kAmxBlock * kPanel);
        q = (uint16_t *)take(rp * d * kPanel / 2);
        p = (uint16_t *)take(kAmxBlock * kPanel / 2);
        k = (uint16_t *)take(kAmxBlock * d / 2);
        v = (uint16_t *)take(kAmxBlock * dv / 2);
        pairs = (uint32_t *)take(kDepth / 2 * dv);
        m = take(rp * kPanel);
        l = take(rp * kPanel);
        rows = take(kPanel * imax(d, dv));
        pos = (int32_t *)take(rp * kPanel);
    }
};

static int64_t amx_scratch_floats(int64_t tokens, int64_t group, const phloem_kv_layer &kv) {
    return AmxScratch(tokens, group, kv).total;
}

static bool amx_fits(const AttentionCall &call) {
    const phloem_kv_layer &kv = call.kv;
    return kv.dtype == PHLOEM_BF16 && !is_latent(kv) && kv.head_dim % kDepth == 0 &&
           value_dim(kv) % kDepth == 0 && kv.head_dim <= kMostDim && value_dim(kv) <= kMostDim &&
           call.args.scale > 0;
}

// y[c][r] = x[r][c] of 16 rows of n words; floats are moved, not touched.
static void turn(const void *x, int64_t n, void *y) {
    transpose((const float *)x, n, kTileRows, n, (float *)y, kTileRows);
}

static void amx_load_queries(const AttentionCall &call, const TileItem &item, int64_t group,
                             AmxScratch &t) {
    const int64_t rows = (item.tok1 - item.tok0) * group;
    uint16_t *rounded = (uint16_t *)t.s;  // 16 rows of d numbers; s is free
    for (int64_t r = 0; r < t.rp * kPanel; ++r) {
        t.m[r] = -__builtin_inff();
        t.l[r] = 0.0f;
        const int64_t token = item.tok0 + imin(r, rows - 1) / group, at = r % kPanel;
        t.pos[r] = call.batch.positions[token];
        if (r < rows) {
            read_query(call.args, token, item.kv_head * group + r % group, t.d, 1.0f, t.rows);
            narrow(t.rows, rounded + at * t.d, t.d);
        } else {
            memset(rounded + at * t.d, 0, sizeof(uint16_t) * t.d);
        }
        if (at == kPanel - 1) turn(rounded, t.d / 2, t.q + r / kPanel * t.d * kPanel);
    }
    memset(t.o, 0, sizeof(float) * t.rp * kPanel * t.dv);
}

// Rows of a block's tokens; where there is none, null.
struct AmxRows {
    int64_t t0 = 0, n = 0;
    const uint16_t *at[kAmxBlock];

    void find(const KvReader &reader, int64_t block, const TileItem &item) {
        const int64_t lead = imax<int64_t>(0, item.t0 - block);
        t0 = block;
        n = imax<int64_t>(0, imin(kAmxBlock, item.t1 - block));
        int64_t offsets[kAmxBlock];
        if (n > lead) reader.offsets(t0 + lead, n - lead, offsets + lead);
        for (int64_t i = 0; i < kAmxBlock; ++i)
            at[i] = i < lead || i >= n ? nullptr : (const uint16_t *)reader.kv.base + offsets[i];
    }
};

// K: [16 tokens][d / 32] tiles as they lie. Nothing of other tokens is read: they are zeros.
static void amx_load_keys(const AmxRows &rows, const AmxScratch &t) {
    for (int64_t i = 0; i < ceil_div(rows.n, kTileRows) * kTileRows; ++i) {
        uint16_t *to = t.k + i / kTileRows * t.d * kTileRows + i % kTileRows * kDepth;
        for (int64_t c = 0; c < t.d; c += kDepth, to += kTileNumbers) {
            if (rows.at[i]) memcpy(to, rows.at[i] + c, 2 * kDepth);
            else memset(to, 0, 2 * kDepth);
        }
    }
}

// V: [32 tokens][dv / 16] tiles of 16 numbers by 32 tokens.
static void amx_load_values(const AmxRows &rows, int64_t value_at, const AmxScratch &t) {
    static const uint16_t zeros[kMostDim] = {};
    for (int64_t i = 0; i < rows.n; i += kDepth) {
        for (int64_t j = 0; j < kDepth / 2; ++j) {
            const uint16_t *even = rows.at[i + 2 * j], *odd = rows.at[i + 2 * j + 1];
            even = even ? even + value_at : zeros;
            odd = odd ? odd + value_at : zeros;
            uint32_t *pair = t.pairs + j * t.dv;
            for (int64_t c = 0; c < t.dv; ++c) pair[c] = (uint32_t)odd[c] << 16 | even[c];
        }
        turn(t.pairs, t.dv, t.v + i * t.dv);
    }
}

// Rows 16 I ... of S from here on: two tiles of tokens at a time, Q's next to each other.
static void amx_scores(const AmxScratch &t, const uint16_t *q, int64_t lead, int64_t n) {
    const int64_t depth = t.d / kDepth, from = lead / kTileRows, end = ceil_div(n, kTileRows);
    const int64_t key_tile = depth * kTileNumbers;
    const uint16_t *k = t.k + from * key_tile;
    float *s = t.s + from * kTileRows * kPanel;
    for (int64_t i = from; i < end; i += 2, k += 2 * key_tile, s += 2 * kTileRows * kPanel) {
        const bool both = i + 1 < end;
        tile_zero<0>();
        if (both) tile_zero<1>();
        for (int64_t c = 0; c < depth; ++c) {
            tile_load<2>(q + c * kTileNumbers, kTileBytes);
            tile_load<3>(k + c * kTileNumbers, kTileBytes);
            tile_dot<0, 3, 2>();
            if (!both) continue;
            tile_load<4>(k + key_tile + c * kTileNumbers, kTileBytes);
            tile_dot<1, 4, 2>();
        }
        tile_store<0>(s, kTileBytes);
        if (both) tile_store<1>(s + kTileRows * kPanel, kTileBytes);
    }
}

// O of a panel += V^T P^T over whole groups of 32 tokens, 32 numbers at a time.
static void amx_values(const AmxScratch &t, float *o, int64_t lead, int64_t n) {
    const int64_t from = lead / kDepth, end = ceil_div(n, kDepth), group = t.dv * kDepth;
    for (int64_t c = 0; c < t.dv; c += 2 * kTileRows, o += 2 * kTileRows * kPanel) {
        const uint16_t *v = t.v + from * group + c * kDepth, *p = t.p + from * kTileNumbers;
        tile_load<0>(o, kTileBytes);
        tile_load<1>(o + kTileRows * kPanel, kTileBytes);
        for (int64_t i = from; i < end; ++i, v += group, p += kTileNumbers) {
            tile_load<2>(p, kTileBytes);
            tile_load<3>(v, kTileBytes);
            tile_dot<0, 3, 2>();
            tile_load<4>(v + kTileNumbers, kTileBytes);
            tile_dot<1, 4, 2>();
        }
        tile_store<0>(o, kTileBytes);
        tile_store<1>(o + kTileRows * kPanel, kTileBytes);
    }
}

// 2^x for x <= kSlack, or a NaN; relative error below 2e-4, far less than rounding to bf16 costs.
PHLOEM_INLINE vf rough_exp2(vf x) {
    const vf magic = set1(12582912.0f + 127.0f);
    vf c = vmax(set1(-127.0f), x);
    vf t = c + magic;
    vf r = c - (t - magic);
    vf p = fma(fma(fma(set1(5.5171669e-2f), r, set1(2.4261112e-1f)), r, set1(6.9325677e-1f)), r,
               set1(9.9992807e-1f));
    return p * (vf)((vi)t << 23);
}

// Half up: a weight is not negative, and what is between two numbers need not go to the even one.
PHLOEM_INLINE vu rounded_bits(vf x) { return (vu)x + 0x8000u; }

// S of a panel becomes P; what it has of sums shrinks if its greatest score has grown much.
struct AmxSoftmax {
    const AmxScratch &t;
    const PanelView &view;
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
        for (int64_t i = first; i < end; ++i) {
            float *at = t.s + i * kPanel + v * W;
            const vi token = vi{} + (int32_t)(view.t0 + i);
            store(at, select((token <= last) & (token >= oldest), load(at), minus_inf));
        }
    }

    vf greatest(int v) const {
        vf most[4];
        for (vf &x : most) x = set1(-__builtin_inff());
        for (int64_t i = first; i < end; i += 4)  // whole tiles
            for (int j = 0; j < 4; ++j) most[j] = vmax(load(t.s + (i + j) * kPanel + v * W), most[j]);
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
            const float *at = t.s + i * kPanel + v * W;
            const vf even = rough_exp2(fma(load(at), set1(factor), -m));
            const vf odd = rough_exp2(fma(load(at + kPanel), set1(factor), -m));
            sums[0] += even;
            sums[1] += odd;
            const vu pair = rounded_bits(even) >> 16 | (rounded_bits(odd) & 0xffff0000u);
            memcpy(t.p + i * kPanel + 2 * v * W, &pair, sizeof pair);
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

static void amx_panel(const AttentionCall &call, const PanelView &view, const AmxScratch &t,
                      int64_t panel) {
    // Whole groups of 32 tokens: what is beyond the panel's own weighs nothing.
    const int64_t first = view.lead / kDepth * kDepth, end = ceil_div(view.n, kDepth) * kDepth;
    const float softcap = call.args.softcap;
    amx_scores(t, t.q + panel * t.d * kPanel, first, view.n);
    const int64_t scored = ceil_div(view.n, kTileRows) * kTileRows;
    if (scored < end) memset(t.s + scored * kPanel, 0, sizeof(float) * (end - scored) * kPanel);
    float factor = call.args.scale * kLog2e;
    if (softcap > 0) {
        float *s = t.s + first * kPanel;
        const float inverse = call.args.scale / softcap;
        for (int64_t i = 0; i < (end - first) * kPanel; i += W)
            store(s + i, vtanh(load(s + i) * inverse));
        factor = softcap * kLog2e;
    }
    const bool masked = view.ragged() || first < view.lead || end > view.n;
    AmxSoftmax{t, view, panel, first, end, factor}.run(masked);
    amx_values(t, t.o + panel * t.dv * kPanel, first, end);
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
        for (int64_t p = 0; p < t.rp; ++p) {
            const PanelView view(call, t.pos + p * kPanel, block, rows.n, read_from);
            if (view.n > view.lead) amx_panel(call, view, t, p);
        }
    }
    tiles_end();
    tile_results(call, item, group, t, o, ml);
}

}  // namespace PHLOEM_NS

const AmxAttention kAmxAttention = {PHLOEM_NS::amx_fits, PHLOEM_NS::amx_scratch_floats,
                                    PHLOEM_NS::amx_tile, PHLOEM_NS::kAmxBlock};

}  // namespace phloem
