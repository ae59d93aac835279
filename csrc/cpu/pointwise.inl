// Norms, RoPE with the write into pages, activations, gather, and choosing from logits.
#pragma once
#include <math.h>

#include "attention.inl"
#include "codec.h"

namespace phloem {
namespace PHLOEM_NS {

// A row of head_dim numbers into its bytes; in codec_isa.cpp.
void pack_row(const phloem_kv_layer &kv, const float *x, uint8_t *out);

static void to_f32(const void *x, int32_t dtype, float *y, int64_t n) {
    if (dtype == PHLOEM_F32) memcpy(y, x, sizeof(float) * n);
    else widen((const uint16_t *)x, y, n);
}

template <class T> PHLOEM_INLINE float mean_square(const T *x, int64_t d) {
    vf acc = {};
    int64_t i = 0;
    for (; i + W <= d; i += W) {
        vf v = load(x + i);
        acc = fma(v, v, acc);
    }
    float sum = hsum(acc);
    for (; i < d; ++i) sum += get(x + i) * get(x + i);
    return sum / (float)d;
}

template <class T, class YT>
static void norm_row(const T *x, const float *w, YT *y, int64_t d, float eps) {
    const float scale = 1.0f / sqrtf(mean_square(x, d) + eps);
    int64_t i = 0;
    for (; i + W <= d; i += W) store(y + i, load(x + i) * scale * load(w + i));
    for (; i < d; ++i) put(y + i, get(x + i) * scale * w[i]);
}

// The same into a row of tiles, one from the next kTileElements apart.
template <class T>
static void norm_tiles(const T *x, const float *w, uint16_t *y, int64_t d, float eps) {
    const float scale = 1.0f / sqrtf(mean_square(x, d) + eps);
    int64_t i = 0;
    const auto at = [&] { return y + i / kBf16Depth * kTileElements + i % kBf16Depth; };
    for (; i + W <= d; i += W) store(at(), load(x + i) * scale * load(w + i));
    for (; i < d; ++i) put(at(), get(x + i) * scale * w[i]);
    for (; i % kBf16Depth; ++i) *at() = 0;
}

template <class T>
static void rmsnorm_rows(const T *x, T *residual, const float *w, void *y, int32_t y_dtype,
                         int64_t m, int64_t d, float eps) {
    for (int64_t row = 0; row < m; ++row) {
        const T *in = x + row * d;
        if (residual) {
            T *r = residual + row * d;
            int64_t i = 0;
            for (; i + W <= d; i += W) store(r + i, load(r + i) + load(in + i));
            for (; i < d; ++i) put(r + i, get(r + i) + get(in + i));
            in = r;
        }
        if (y_dtype == PHLOEM_F32) norm_row(in, w, (float *)y + row * d, d, eps);
        else if (y_dtype == kTiles)
            norm_tiles(in, w, (uint16_t *)y + tile_at(row, 0, ceil_div(d, kBf16Depth)), d, eps);
        else norm_row(in, w, (uint16_t *)y + row * d, d, eps);
    }
}

static void rmsnorm(const void *x, void *residual, const float *w, void *y, int32_t dtype,
                    int32_t y_dtype, int64_t m, int64_t d, float eps) {
    if (dtype == PHLOEM_F32)
        rmsnorm_rows((const float *)x, (float *)residual, w, y, y_dtype, m, d, eps);
    else rmsnorm_rows((const uint16_t *)x, (uint16_t *)residual, w, y, y_dtype, m, d, eps);
}

template <class T>
static void norm_add_row(const float *x, const float *w, T *y, int64_t d, float eps) {
    const float scale = 1.0f / sqrtf(mean_square(x, d) + eps);
    int64_t i = 0;
    for (; i + W <= d; i += W) store(y + i, load(y + i) + load(x + i) * scale * load(w + i));
    for (; i < d; ++i) put(y + i, get(y + i) + x[i] * scale * w[i]);
}

static void rmsnorm_add(const float *x, const float *w, void *y, int32_t y_dtype, int64_t m,
                        int64_t d, float eps) {
    for (int64_t row = 0; row < m; ++row) {
        const float *in = x + row * d;
        if (y_dtype == PHLOEM_F32) norm_add_row(in, w, (float *)y + row * d, d, eps);
        else norm_add_row(in, w, (uint16_t *)y + row * d, d, eps);
    }
}

template <class T>
static void silu_mul_rows(const T *gate, const T *up, T *y, int64_t m, int64_t d,
                          int64_t in_stride) {
    for (int64_t row = 0; row < m; ++row) {
        const T *g = gate + row * in_stride, *u = up + row * in_stride;
        T *out = y + row * d;
        int64_t i = 0;
        for (; i + W <= d; i += W) store(out + i, vsilu(load(g + i)) * load(u + i));
        for (; i < d; ++i) put(out + i, vsilu(set1(get(g + i)))[0] * get(u + i));
    }
}

static void silu_mul(const void *gate, const void *up, void *y, int32_t dtype, int64_t m,
                     int64_t d, int64_t in_stride) {
    if (dtype == PHLOEM_F32)
        silu_mul_rows((const float *)gate, (const float *)up, (float *)y, m, d, in_stride);
    else
        silu_mul_rows((const uint16_t *)gate, (const uint16_t *)up, (uint16_t *)y, m, d,
                      in_stride);
}

// One head: [RMSNorm,] rotate pairs (i, i + rotary_dim / 2), into `out` of either dtype.
template <class T, class OUT>
static void rope_head(const T *x, OUT *out, const float *norm, const phloem_rope_args &args,
                      int64_t d, const float *cos, const float *sin) {
    const int64_t half = args.rotary_dim / 2;
    const float scale = norm ? 1.0f / sqrtf(mean_square(x, d) + args.norm_eps) : 1.0f;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
        if (norm) {
            a = a * scale * load(norm + i);
            b = b * scale * load(norm + i + half);
        }
        store(out + i, a * c - b * s);
        store(out + i + half, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = get(x + i), b = get(x + i + half);
        if (norm) {
            a *= scale * norm[i];
            b *= scale * norm[i + half];
        }
        put(out + i, a * cos[i] - b * sin[i]);
        put(out + i + half, b * cos[i] + a * sin[i]);
    }
    i = 2 * half;
    for (; !norm && i + W <= d; i += W) store(out + i, load(x + i));
    for (; i < d; ++i) put(out + i, get(x + i) * (norm ? scale * norm[i] : 1.0f));
}

// A head's K, or V, into its row of a page.
template <class T>
static void write_key(const phloem_rope_args &args, const phloem_kv_layer &kv, const T *x,
                      int64_t at, const float *cos, const float *sin) {
    const int64_t d = kv.head_dim;
    if (is_packed(kv.dtype)) {
        float numbers[kMostRowNumbers];
        rope_head(x, numbers, args.k_norm, args, d, cos, sin);
        pack_row(kv, numbers, (uint8_t *)kv.base + at);
    } else if (kv.dtype == PHLOEM_F32) {
        rope_head(x, (float *)kv.base + at, args.k_norm, args, d, cos, sin);
    } else {
        rope_head(x, (uint16_t *)kv.base + at, args.k_norm, args, d, cos, sin);
    }
}

template <class T, class KV> PHLOEM_INLINE void copy_numbers(const T *x, KV *out, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, load(x + i));
    for (; i < n; ++i) put(out + i, get(x + i));
}

template <class T> static void write_value(const phloem_kv_layer &kv, const T *x, int64_t at) {
    const int64_t d = kv.head_dim;
    if (is_packed(kv.dtype)) {
        float numbers[kMostRowNumbers];
        copy_numbers(x, numbers, d);
        pack_row(kv, numbers, (uint8_t *)kv.base + at);
    } else if (kv.dtype == PHLOEM_F32) {
        copy_numbers(x, (float *)kv.base + at, d);
    } else {
        copy_numbers(x, (uint16_t *)kv.base + at, d);
    }
}

template <class T>
static void rope_tokens(const phloem_rope_args &args, const phloem_kv_layer &kv,
                        const phloem_batch &batch, int32_t row, int32_t tok0, int32_t tok1) {
    const int64_t d = kv.head_dim, half = args.rotary_dim / 2;
    const int64_t *table = batch.tables + row * batch.table_stride;
    const RowBounds bounds = row_bounds(batch, row);
    for (int64_t token = tok0; token < tok1; ++token) {
        const int64_t pos = batch.positions[token];
        const float *cos = args.cos + pos * half, *sin = args.sin + pos * half;
        T *q = (T *)args.q + token * args.q_stride;
        for (int64_t h = 0; h < args.num_heads; ++h)
            rope_head(q + h * d, q + h * d, args.q_norm, args, d, cos, sin);
        if (pos < bounds.write_from) continue;
        const T *k = (const T *)args.k + token * args.k_stride;
        const T *v = (const T *)args.v + token * args.v_stride;
        const int64_t page = table[pos / kv.page_size - bounds.base] * kv.page_stride +
                             pos % kv.page_size * kv.token_stride;
        for (int64_t h = 0; h < kv.num_kv_heads; ++h) {
            const int64_t at = page + h / kv.heads_per_group * kv.group_stride +
                               h % kv.heads_per_group * kv.head_stride;
            write_key(args, kv, k + h * d, at, cos, sin);
            if (!is_latent(kv)) write_value(kv, v + h * d, at + kv.kv_stride);
        }
    }
}

static void rope(const phloem_rope_args &args, const phloem_kv_layer &kv,
                 const phloem_batch &batch, int32_t row, int32_t tok0, int32_t tok1) {
    if (args.dtype == PHLOEM_F32) rope_tokens<float>(args, kv, batch, row, tok0, tok1);
    else rope_tokens<uint16_t>(args, kv, batch, row, tok0, tok1);
}

constexpr int64_t kArgmaxBlock = 1024;

// Greatest of x (n); `bad` is set where one is not finite: only then x - x is not 0.
template <class T> static float max_of(const T *x, int64_t n, vi &bad) {
    const vf low = set1(-__builtin_inff());
    vf top[4] = {low, low, low, low};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            vf v = load(x + i + j * W);
            top[j] = vmax(v, top[j]);
            bad |= v - v != 0.0f;
        }
    }
    float best = hmax(vmax(vmax(top[0], top[1]), vmax(top[2], top[3])));
    for (; i < n; ++i) {
        const float v = get(x + i);
        bad[0] |= v - v != 0.0f;
        best = v > best ? v : best;
    }
    return best;
}

template <class T> static int64_t argmax_row(const T *x, int64_t n) {
    vi bad = {};
    float best = -__builtin_inff();
    int64_t at = 0;
    for (int64_t i = 0; i < n; i += kArgmaxBlock) {
        const float top = max_of(x + i, imin(kArgmaxBlock, n - i), bad);
        if (top > best) best = top, at = i;
    }
    for (int j = 0; j < W; ++j)
        if (bad[j]) return -1;
    while (get(x + at) != best) ++at;
    return at;
}

static int64_t argmax(const void *x, int32_t dtype, int64_t n) {
    return dtype == PHLOEM_F32 ? argmax_row((const float *)x, n)
                               : argmax_row((const uint16_t *)x, n);
}

// A binary heap with the worst of the k kept at its root: smaller value, then greater index.
struct Worst {
    float *value;
    int64_t *index;
    int64_t size;

    bool worse(int64_t a, int64_t b) const {
        return value[a] < value[b] || (value[a] == value[b] && index[a] > index[b]);
    }
    void swap(int64_t a, int64_t b) {
        float v = value[a];
        int64_t i = index[a];
        value[a] = value[b], index[a] = index[b];
        value[b] = v, index[b] = i;
    }
    void sink(int64_t at) {
        for (int64_t child; (child = 2 * at + 1) < size; at = child) {
            if (child + 1 < size && worse(child + 1, child)) ++child;
            if (!worse(child, at)) return;
            swap(child, at);
        }
    }
    void rise(int64_t at) {
        for (; at > 0 && worse(at, (at - 1) / 2); at = (at - 1) / 2) swap(at, (at - 1) / 2);
    }
    void offer(float v, int64_t i, int64_t k) {
        if (size < k) {
            value[size] = v, index[size] = i;
            rise(size++);
        } else if (v > value[0]) {
            value[0] = v, index[0] = i;
            sink(0);
        }
    }
};

template <class T>
static void top_k_row(const T *x, int64_t n, int64_t k, float *values, int64_t *indices,
                      float *lse) {
    Worst heap{values, indices, 0};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        if (heap.size == k) {
            vi above = load(x + i) > values[0];
            int any = 0;
            for (int j = 0; j < W; ++j) any |= above[j];
            if (!any) continue;
        }
        for (int64_t j = i; j < i + W; ++j) {
            float v = get(x + j);
            if (v == v) heap.offer(v, j, k);
        }
    }
    for (; i < n; ++i) {
        float v = get(x + i);
        if (v == v) heap.offer(v, i, k);
    }
    for (int64_t j = heap.size; j < k; ++j) values[j] = -__builtin_inff(), indices[j] = -1;
    while (heap.size > 1) {  // the worst goes last
        heap.swap(0, heap.size - 1);
        --heap.size;
        heap.sink(0);
    }
    if (!lse) return;
    const float top = values[0];
    vf sum = {};
    for (i = 0; i + W <= n; i += W) sum += vexp(load(x + i) - top);
    float total = hsum(sum);
    for (; i < n; ++i) total += scalar_exp(get(x + i) - top);
    *lse = top + logf(total);
}

static void top_k(const void *x, int32_t dtype, int64_t n, int64_t k, float *values,
                  int64_t *indices, float *lse) {
    if (dtype == PHLOEM_F32) top_k_row((const float *)x, n, k, values, indices, lse);
    else top_k_row((const uint16_t *)x, n, k, values, indices, lse);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
