// Attention of one query token (a group of heads) over a part of its context; parts are merged.
//
// A block of tokens at a time: their scores, their weights, the sum of their values. A row is
// widened in registers, once for three heads. Packed rows are not unpacked: sums and weights are
// multiplied with their scales, not the numbers.
//
// A page has 2 KiB or so of a head's K and V and lies anywhere, so the hardware would wait for
// memory at each of them. While a block's scores are made its rows of V are asked for, and while
// its values are added up the rows of K of the next block, be it another item's.
#pragma once
#include "attention.inl"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kDecodeBlock = 64;  // tokens of K and V per step
constexpr int kTogether = 4;          // tokens whose scores are made together
constexpr int64_t kLineBytes = 64;

static int64_t decode_scratch_floats(int64_t group, int64_t head_dim) {
    return group * (head_dim + kDecodeBlock) + head_dim + W;
}

// Where the rows of a block's tokens are.
struct RowBlock {
    int64_t n = 0;
    int64_t at[kDecodeBlock];

    // Tokens from t on of those before `end`; the last one's row fills up the last few.
    void find(const KvReader &reader, int64_t t, int64_t end) {
        n = imin(kDecodeBlock, end - t);
        reader.offsets(t, n, at);
        for (int64_t i = n; i % kTogether; ++i) at[i] = at[n - 1];
    }
};

// Rows that are to be in the cache soon. They are asked for in order and evenly over the time until
// then: what the processor has no room to note it drops.
struct Ahead {
    const char *base;
    int64_t item_bytes, row_bytes;
    const int64_t *at;
    int64_t n, every;  // a row is asked for after so many tokens of any pass over them; 0: none is
    int64_t row = 0, left = every;

    void ask() {
        left = every;
        if (row >= n) return;
        const char *line = base + at[row++] * item_bytes, *end = line + row_bytes;
        do __builtin_prefetch(line);
        while ((line += kLineBytes) < end);
    }
    void token() {
        if (--left == 0) ask();
    }
};

// The first line of each run of rows: from there the processor follows by itself, into the second cache.
static void ask_for_runs(const char *base, int64_t item_bytes, int64_t stride, const RowBlock &rows) {
    for (int64_t i = 0; i < rows.n; ++i)
        if (i == 0 || rows.at[i] != rows.at[i - 1] + stride)
            __builtin_prefetch(base + rows.at[i] * item_bytes, 0, 2);
}

// Vector V of numbers c ... of a row, 2: of the W numbers that are left at its end.
template <class R, int V>
PHLOEM_INLINE vf row_vector(const typename R::Item *row, int64_t n, int64_t c) {
    if constexpr (V == 2) return R::load(row, n, c);
    else return R::template half<V>(row, n, c);
}

// The same beside twelve sums and three queries, which leave no register for a mask.
template <class R, int V>
PHLOEM_INLINE vf key_vector(const typename R::Item *row, int64_t n, int64_t c) {
    if constexpr (R::kInterleaved && V == 1) return load_odd(row + c);
    else return row_vector<R, V>(row, n, c);
}

// A part of n numbers of a row, in order, to the order in which its vectors come, and back.
template <class R> static void to_row_order(const float *x, int64_t n, float *y) {
    int64_t c = 0;
    for (; R::kInterleaved && c + 2 * W <= n; c += 2 * W)
        for (int j = 0; j < W; ++j) y[c + j] = x[c + 2 * j], y[c + W + j] = x[c + 2 * j + 1];
    for (; c < n; ++c) y[c] = x[c];
}
template <class R> static void from_row_order(const float *x, int64_t n, float *y) {
    int64_t c = 0;
    for (; R::kInterleaved && c + 2 * W <= n; c += 2 * W)
        for (int j = 0; j < W; ++j) y[c + 2 * j] = x[c + j], y[c + 2 * j + 1] = x[c + W + j];
    for (; c < n; ++c) y[c] = x[c];
}

// A part of the rows of K against the same part of the queries, whose rows are q_stride apart.
template <class R> struct KeyPart {
    const typename R::Item *base;
    int64_t n;
    const float *q;
    int64_t q_stride;
};

template <class R, int G, int V>
PHLOEM_INLINE void add_products(const KeyPart<R> &part, const int64_t *at, int64_t c,
                                vf (&acc)[G][kTogether]) {
    vf x[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) x[g] = load(part.q + g * part.q_stride + c + (V == 1 ? W : 0));
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
        vf k = key_vector<R, V>(part.base + at[i], part.n, c);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[g][i] = fma(x[g], k, acc[g][i]);
    }
}

// s[g][i] (+)= q[g] . K[i] for G heads and four tokens.
template <class R, int G, bool ADD>
PHLOEM_INLINE void decode_scores_of(const KeyPart<R> &part, const int64_t *at, float *s) {
    vf acc[G][kTogether] = {};
    int64_t c = 0;
    for (; c + 2 * W <= part.n; c += 2 * W) {
        add_products<R, G, 0>(part, at, c, acc);
        add_products<R, G, 1>(part, at, c, acc);
    }
    if (c < part.n) add_products<R, G, 2>(part, at, c, acc);
    v4 scale = {};
    for (int i = 0; R::kScaled && i < kTogether; ++i)
        scale[i] = R::scale(part.base + at[i], part.n);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
        v4 x = hsums(acc[g]), old;
        if (R::kScaled) x *= scale;
        float *out = s + g * kDecodeBlock;
        memcpy(&old, out, sizeof old);
        if (ADD) x += old;
        memcpy(out, &x, sizeof x);
    }
}

template <class R, int G, bool ADD>
static void decode_scores(const KeyPart<R> &part, const RowBlock &rows, Ahead &ahead,
                          float *s) {
    for (int64_t i = 0; i < rows.n; i += kTogether) {
        for (int j = 0; j < kTogether; ++j) ahead.token();
        decode_scores_of<R, G, ADD>(part, rows.at + i, s + i);
    }
}

template <class R, bool ADD>
static void decode_scores_part(KeyPart<R> part, const RowBlock &rows, int64_t group,
                               Ahead &ahead, float *s) {
    for (int64_t g = 0; g < group; g += 3) {
        switch (imin<int64_t>(3, group - g)) {
            case 3: decode_scores<R, 3, ADD>(part, rows, ahead, s); break;
            case 2: decode_scores<R, 2, ADD>(part, rows, ahead, s); break;
            default: decode_scores<R, 1, ADD>(part, rows, ahead, s); break;
        }
        part.q += 3 * part.q_stride;
        s += 3 * kDecodeBlock;
    }
}

// Rows of V: those of a block, of d numbers each.
template <class R> struct Values {
    const typename R::Item *base;
    const RowBlock &rows;
    int64_t d;
};

// o[g][c0 ...] += sum over i of p[g][i] V[i][c0 ...] for G heads and NC vectors of the head.
template <class R, int G, int NC>
PHLOEM_INLINE void decode_values_part(const Values<R> &values, const float *p, float *o,
                                      int64_t c0, Ahead &ahead) {
    const int64_t d = values.d;
    vf acc[G][NC];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) acc[g][c] = load(o + g * d + c0 + c * W);
    for (int64_t i = 0; i < values.rows.n; ++i) {
        ahead.token();
        const auto *v = values.base + values.rows.at[i];
        vf w[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) w[g] = set1(p[g * kDecodeBlock + i]);
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) {
            const int64_t at = c0 + c / 2 * 2 * W;
            vf x = NC == 1  ? row_vector<R, 2>(v, d, at)
                   : c % 2 ? row_vector<R, 1>(v, d, at)
                           : row_vector<R, 0>(v, d, at);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) acc[g][c] = fma(w[g], x, acc[g][c]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) store(o + g * d + c0 + c * W, acc[g][c]);
}

// Heads whose values are added up together: interleaved rows need a register for their mask.
template <class R> constexpr int64_t value_heads() { return R::kInterleaved && W == 8 ? 2 : 3; }
template <class R> static int64_t value_passes(int64_t group, int64_t d) {
    const int64_t alone = group % value_heads<R>() == 1;
    const int64_t passes = group / value_heads<R>() * ceil_div(d, 4 * W) + alone * ceil_div(d, 8 * W);
    return passes + (group % value_heads<R>() == 2) * ceil_div(d, 4 * W);
}

template <class R, int G>
static void decode_values(const Values<R> &values, const float *p, float *o, Ahead &ahead) {
    const int64_t d = values.d;
    int64_t c = 0;
    for (; G == 1 && c + 8 * W <= d; c += 8 * W)
        decode_values_part<R, G, 8>(values, p, o, c, ahead);
    for (; c + 4 * W <= d; c += 4 * W)
        decode_values_part<R, G, 4>(values, p, o, c, ahead);
    for (; c + 2 * W <= d; c += 2 * W)
        decode_values_part<R, G, 2>(values, p, o, c, ahead);
    if (c < d) decode_values_part<R, G, 1>(values, p, o, c, ahead);
}

// Scores of n tokens in s (group, kDecodeBlock) become weights; o shrinks to the new maximum.
static void decode_softmax(int64_t n, int64_t group, int64_t d, float softcap, float *s, float *o,
                           float *ml) {
    const int64_t padded = (n + W - 1) / W * W;
    for (int64_t g = 0; g < group; ++g) {
        float *row = s + g * kDecodeBlock;
        if (softcap > 0) bend_scores(row, padded, softcap, softcap);
        for (int64_t i = n; i < padded; ++i) row[i] = -__builtin_inff();
        vf top = load(row);
        for (int64_t i = W; i < padded; i += W) top = vmax(load(row + i), top);
        const float old = ml[2 * g];
        float now = imax(old, hmax(top)), shrink = 1.0f;
        if (!(now > -__builtin_inff())) now = 0.0f;
        else if (now != old) shrink = scalar_exp(old - now);
        vf sum = {};
        for (int64_t i = 0; i < padded; i += W) {
            vf p = vexp_down(load(row + i) - now);
            store(row + i, p);
            sum += p;
        }
        ml[2 * g] = now;
        ml[2 * g + 1] = ml[2 * g + 1] * shrink + hsum(sum);
        if (shrink == 1.0f) continue;
        for (int64_t c = 0; c < d; c += W) store(o + g * d + c, load(o + g * d + c) * shrink);
    }
}

// One item on its way: queries q (group, head_dim) and sums o (group, values) in the order of rows.
struct Decoding {
    const AttentionCall &call;
    int64_t group;
    const float *q;
    float *s, *o, *ml;
};

template <class R>
static void decode_block(const Decoding &part, const RowBlock &rows, const RowBlock &next) {
    typedef typename R::Item Item;
    const phloem_kv_layer &kv = part.call.kv;
    const int64_t d = kv.head_dim, dv = value_dim(kv), lead = lead_dim(kv), group = part.group;
    const Item *k = (const Item *)kv.base, *v = k + kv.kv_stride;
    const int64_t item = sizeof(Item), key_bytes = item * row_items(kv);
    const int64_t value_bytes = item * part_items(kv.dtype, dv);
    Ahead values{(const char *)v, item, value_bytes, rows.at, is_latent(kv) ? 0 : rows.n,
                 ceil_div(group, 3)};
    Ahead keys{(const char *)k, item, key_bytes, next.at, next.n, value_passes<R>(group, dv)};
    Ahead nothing{};
    ask_for_runs((const char *)k, item, kv.token_stride, next);
    float *s = part.s;
    decode_scores_part<R, false>({k, lead, part.q, d}, rows, group, values, s);
    if (kv.tail_dim > 0)
        decode_scores_part<R, true>(
            {k + part_items(kv.dtype, lead), kv.tail_dim, part.q + lead, d}, rows, group,
            nothing, s);
    decode_softmax(rows.n, group, dv, part.call.args.softcap, s, part.o, part.ml);
    for (int64_t i = 0; R::kScaled && i < rows.n; ++i) {
        const float scale = R::scale(v + rows.at[i], dv);
        for (int64_t g = 0; g < group; ++g) s[g * kDecodeBlock + i] *= scale;
    }
    constexpr int64_t kHeads = value_heads<R>();
    for (int64_t g = 0; g < group; g += kHeads) {
        const float *p = s + g * kDecodeBlock;
        float *o = part.o + g * dv;
        switch (imin(kHeads, group - g)) {
            case 3: decode_values<R, kHeads>({v, rows, dv}, p, o, keys); break;
            case 2: decode_values<R, 2>({v, rows, dv}, p, o, keys); break;
            default: decode_values<R, 1>({v, rows, dv}, p, o, keys); break;
        }
    }
}

template <class R>
static void decode_item(const AttentionCall &call, const DecodeItem &item, const DecodeItem *next,
                        float *o, float *ml, float *scratch) {
    const int64_t group = call.args.num_heads / call.kv.num_kv_heads, d = call.kv.head_dim;
    const int64_t dv = value_dim(call.kv), lead = lead_dim(call.kv);
    float *q = scratch, *s = q + group * d, *in_order = s + group * kDecodeBlock;
    for (int64_t g = 0; g < group; ++g) {
        read_query(call.args, item.token, item.kv_head * group + g, d, call.args.scale, in_order);
        to_row_order<R>(in_order, lead, q + g * d);
        to_row_order<R>(in_order + lead, d - lead, q + g * d + lead);
        ml[2 * g] = -__builtin_inff();
        ml[2 * g + 1] = 0.0f;
    }
    memset(o, 0, sizeof(float) * group * dv);
    const Decoding part{call, group, q, s, o, ml};
    const KvReader reader(call, item.row, item.kv_head);
    RowBlock blocks[2], *rows = &blocks[0], *ahead = &blocks[1];
    rows->find(reader, item.t0, item.t1);
    for (int64_t t = item.t0; t < item.t1; t += kDecodeBlock) {
        ahead->n = 0;
        if (t + kDecodeBlock < item.t1) ahead->find(reader, t + kDecodeBlock, item.t1);
        else if (next) ahead->find(KvReader(call, next->row, next->kv_head), next->t0, next->t1);
        decode_block<R>(part, *rows, *ahead);
        RowBlock *done = rows;
        rows = ahead;
        ahead = done;
    }
    for (int64_t g = 0; R::kInterleaved && g < group; ++g) {
        memcpy(in_order, o + g * dv, sizeof(float) * dv);
        from_row_order<R>(in_order, dv, o + g * dv);
    }
}

static void attention_decode(const AttentionCall &call, const DecodeItem &item,
                             const DecodeItem *next, float *o, float *ml, float *scratch) {
    with_rows(call.kv, [&](auto rows) {
        decode_item<decltype(rows)>(call, item, next, o, ml, scratch);
    });
}

}  // namespace PHLOEM_NS
}  // namespace phloem
