// What AMX tiles of attention are made from: queries, and a block of K and V, as bf16 tiles.
//
// A tile of the right side of a product holds pairs of what is multiplied away, side by side:
// [number / 2][16 queries][2] of Q, [token / 2][16 queries][2] of the weights.
#pragma once
#include "attention_tile.inl"
#include "tiles.h"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kAmxBlock = 96;    // tokens of K and V per step: with scores of two panels in L1
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
        s = take(2 * kAmxBlock * kPanel);  // of two panels
        q = (uint16_t *)take(rp * d * kPanel / 2);
        p = (uint16_t *)take(2 * kAmxBlock * kPanel / 2);
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

}  // namespace PHLOEM_NS
}  // namespace phloem
