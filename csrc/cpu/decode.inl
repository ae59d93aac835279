// Attention of one query token (a group of heads) over a part of its context; parts are merged.
//
// Packed rows are not unpacked: sums and weights are multiplied with their scales, not the numbers.
#pragma once
#include "attention.inl"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kDecodeBlock = 64;  // tokens of K and V per step

static int64_t decode_scratch_floats(int64_t group, int64_t head_dim) {
    return group * (head_dim + kDecodeBlock) + W;
}

// A part of the rows of K against the same part of the queries, whose rows are q_stride apart.
template <class R> struct KeyPart {
    const typename R::Item *base;
    int64_t n;
    const float *q;
    int64_t q_stride;
};

// s[g][i] (+)= q[g] . K[i] for G heads and N neighbouring tokens, which share the loads of q.
template <class R, int G, int N, bool ADD>
PHLOEM_INLINE void decode_scores_of(const KeyPart<R> &part, const int64_t *at, float *s) {
    vf acc[G][N] = {};
    for (int64_t c = 0; c < part.n; c += W) {
        vf k[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) k[i] = R::load(part.base + at[i], part.n, c);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            vf x = load(part.q + g * part.q_stride + c);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) acc[g][i] = fma(x, k[i], acc[g][i]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
        const float scale = R::scale(part.base + at[i], part.n);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            float x = hsum(acc[g][i]);
            if (R::kScaled) x *= scale;
            float *out = s + g * kDecodeBlock + i;
            *out = ADD ? *out + x : x;
        }
    }
}

template <class R, int G, bool ADD>
static void decode_scores(const KeyPart<R> &part, const int64_t *at, int64_t n, float *s) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) decode_scores_of<R, G, 4, ADD>(part, at + i, s + i);
    for (; i < n; ++i) decode_scores_of<R, G, 1, ADD>(part, at + i, s + i);
}

template <class R, bool ADD>
static void decode_scores_part(KeyPart<R> part, const int64_t *at, int64_t n, int64_t group,
                               float *s) {
    for (int64_t g = 0; g < group; g += 3) {
        switch (imin<int64_t>(3, group - g)) {
            case 3: decode_scores<R, 3, ADD>(part, at, n, s); break;
            case 2: decode_scores<R, 2, ADD>(part, at, n, s); break;
            default: decode_scores<R, 1, ADD>(part, at, n, s); break;
        }
        part.q += 3 * part.q_stride;
        s += 3 * kDecodeBlock;
    }
}

// o[g][c0 ...] += sum over i of p[g][i] V[i][c0 ...] for G heads and NC vectors of the head.
template <class R, int G, int NC>
PHLOEM_INLINE void decode_values_part(const typename R::Item *base, const int64_t *at, int64_t n,
                                      const float *p, float *o, int64_t d, int64_t c0) {
    vf acc[G][NC];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int c = 0; c < NC; ++c) acc[g][c] = load(o + g * d + c0 + c * W);
    for (int64_t i = 0; i < n; ++i) {
        const auto *v = base + at[i];
        vf x[NC];
#pragma GCC unroll 4
        for (int c = 0; c < NC; ++c) x[c] = R::load(v, d, c0 + c * W);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            vf w = set1(p[g * kDecodeBlock + i]);
#pragma GCC unroll 4
            for (int c = 0; c < NC; ++c) acc[g][c] = fma(w, x[c], acc[g][c]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int c = 0; c < NC; ++c) store(o + g * d + c0 + c * W, acc[g][c]);
}

template <class R, int G>
static void decode_values(const typename R::Item *base, const int64_t *at, int64_t n,
                          const float *p, float *o, int64_t d) {
    int64_t c = 0;
    for (; c + 4 * W <= d; c += 4 * W) decode_values_part<R, G, 4>(base, at, n, p, o, d, c);
    for (; c < d; c += W) decode_values_part<R, G, 1>(base, at, n, p, o, d, c);
}

// Scores of n tokens in s (group, kDecodeBlock) become weights; o shrinks to the new maximum.
static void decode_softmax(int64_t n, int64_t group, int64_t d, float softcap, float *s, float *o,
                           float *ml) {
    for (int64_t g = 0; g < group; ++g) {
        float *row = s + g * kDecodeBlock;
        if (softcap > 0) bend_scores(row, (n + W - 1) / W * W, softcap);
        for (int64_t i = n; i < kDecodeBlock; ++i) row[i] = -__builtin_inff();
        vf top = load(row);
        for (int64_t i = W; i < kDecodeBlock; i += W) top = vmax(load(row + i), top);
        float old = ml[2 * g], now = imax(old, hmax(top)), shrink = scalar_exp(old - now);
        if (!(now > -__builtin_inff())) shrink = now = 0.0f;
        vf sum = {};
        for (int64_t i = 0; i < kDecodeBlock; i += W) {
            vf p = vexp(load(row + i) - now);
            store(row + i, p);
            sum += p;
        }
        ml[2 * g] = now;
        ml[2 * g + 1] = ml[2 * g + 1] * shrink + hsum(sum);
        for (int64_t c = 0; c < d; c += W) store(o + g * d + c, load(o + g * d + c) * shrink);
    }
}

template <class R>
static void decode_block(const phloem_kv_layer &kv, const int64_t *at, int64_t n, int64_t group,
                         float softcap, const float *q, float *s, float *o, float *ml) {
    typedef typename R::Item Item;
    const int64_t d = kv.head_dim, dv = value_dim(kv), lead = lead_dim(kv);
    const Item *k = (const Item *)kv.base, *v = k + kv.kv_stride;
    decode_scores_part<R, false>({k, lead, q, d}, at, n, group, s);
    if (kv.tail_dim > 0)
        decode_scores_part<R, true>({k + part_items(kv.dtype, lead), kv.tail_dim, q + lead, d}, at,
                                    n, group, s);
    decode_softmax(n, group, dv, softcap, s, o, ml);
    if (R::kScaled) {
        for (int64_t i = 0; i < n; ++i) {
            const float scale = R::scale(v + at[i], dv);
            for (int64_t g = 0; g < group; ++g) s[g * kDecodeBlock + i] *= scale;
        }
    }
    for (int64_t g = 0; g < group; g += 3) {
        const float *p = s + g * kDecodeBlock;
        switch (imin<int64_t>(3, group - g)) {
            case 3: decode_values<R, 3>(v, at, n, p, o + g * dv, dv); break;
            case 2: decode_values<R, 2>(v, at, n, p, o + g * dv, dv); break;
            default: decode_values<R, 1>(v, at, n, p, o + g * dv, dv); break;
        }
    }
}

static void attention_decode(const AttentionCall &call, const DecodeItem &item, float *o,
                             float *ml, float *scratch) {
    const int64_t group = call.args.num_heads / call.kv.num_kv_heads, d = call.kv.head_dim;
    float *q = scratch, *s = q + group * d;
    for (int64_t g = 0; g < group; ++g) {
        read_query(call.args, item.token, item.kv_head * group + g, d, q + g * d);
        ml[2 * g] = -__builtin_inff();
        ml[2 * g + 1] = 0.0f;
    }
    memset(o, 0, sizeof(float) * group * value_dim(call.kv));
    const KvReader reader(call, item.row, item.kv_head);
    int64_t at[kDecodeBlock];
    for (int64_t t = item.t0; t < item.t1; t += kDecodeBlock) {
        int64_t n = imin(kDecodeBlock, item.t1 - t);
        reader.offsets(t, n, at);
        with_rows(call.kv, [&](auto rows) {
            decode_block<decltype(rows)>(call.kv, at, n, group, call.args.softcap, q, s, o, ml);
        });
    }
}

}  // namespace PHLOEM_NS
}  // namespace phloem
