// y = x W^T over panels of quantised weights: 16 columns, blocks of 32 weights along k.
//
//   panel p, block b:  16 scales (fp16) | Q4_1: 16 offsets (fp16) | integers
//   4 bits:  [k / 8][half][8 columns][2] words of 16 bits; nibble t of word s is k = 8 g + 2 t + s
//   8 bits:  [k / 4][half][8 columns][2] words of 16 bits; byte t of word s is k = 4 g + 2 t + s
//
// The bits of GGUF's blocks, in an order in which a mask and a shift give pairs of k for 8 columns:
// what one multiply-add of 16-bit integers takes. Activations become 16-bit integers with a scale
// per block (error 2^-16 of the block's greatest, less than bf16 activations lose), sums of a block
// are exact, blocks are added in order: a row's result does not depend on the rows beside it.
#pragma once
#include "gemm.inl"

namespace phloem {
namespace PHLOEM_NS {

PHLOEM_INLINE float half_to_float(const uint8_t *at) {
    uint16_t h;
    memcpy(&h, at, 2);
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu, u;
    if (rest >= 0x7c00u) {
        u = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    } else if (rest >= 0x400u) {
        u = sign | ((rest + 0x1c000u) << 13);
    } else {  // subnormal: rest * 2^-24
        float f = (float)rest * 5.9604644775390625e-8f;
        return sign ? -f : f;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
#endif
}

struct XBlock {
    int16_t q[kBlockWeights];
    float scale, sum;  // sum: of the activations as rounded
    int32_t total;     // of q
};
static_assert(sizeof(XBlock) == kXqBytes, "XBlock size");

#if defined(__AVX2__)
PHLOEM_INLINE void quantize_block(const float *x, XBlock *out) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 v[4], top = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        top = _mm256_max_ps(top, _mm256_and_ps(v[i], magnitude));
        if (_mm256_movemask_ps(_mm256_cmp_ps(v[i], v[i], _CMP_UNORD_Q)))  // max drops a NaN
            top = _mm256_set1_ps(__builtin_inff());
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    const float most = _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
    const bool finite = most <= 3.0e38f;
    const __m256 inverse = _mm256_set1_ps(most > 0.0f && finite ? 32767.0f / most : 0.0f);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 4; i += 2) {
        __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], inverse));
        total = _mm256_add_epi32(total, _mm256_add_epi32(a, b));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm256_storeu_si256((__m256i *)(out->q + 8 * i), both);
    }
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    out->total = _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
    out->scale = finite ? most / 32767.0f : __builtin_nanf("");
}
#else
PHLOEM_INLINE void quantize_block(const float *x, XBlock *out) {
    float most = 0.0f;
    bool finite = true;
    for (int i = 0; i < kBlockWeights; ++i) {
        float a = x[i] < 0 ? -x[i] : x[i];
        finite &= a <= 3.0e38f;
        most = imax(most, a);
    }
    const float inverse = most > 0.0f && finite ? 32767.0f / most : 0.0f;
    out->total = 0;
    for (int i = 0; i < kBlockWeights; ++i) {
        float r = finite ? x[i] * inverse : 0.0f;
        out->q[i] = (int16_t)(int32_t)(r + (r < 0 ? -0.5f : 0.5f));
        out->total += out->q[i];
    }
    out->scale = finite ? most / 32767.0f : __builtin_nanf("");
}
#endif

// NaN or infinity in x makes its block's scale, and so the row's results, NaN.
static void quantize_x(const float *x, int64_t k, void *xq) {
    XBlock *out = (XBlock *)xq;
    for (; k > 0; k -= kBlockWeights, x += kBlockWeights, ++out) {
        float padded[kBlockWeights] = {};
        const float *from = x;
        if (k < kBlockWeights) from = (const float *)memcpy(padded, x, k * sizeof(float));
        quantize_block(from, out);
        out->sum = (float)out->total * out->scale;
    }
}

template <int FORMAT> struct Block {
    static constexpr int kOffsets = FORMAT == PHLOEM_W_Q4_1 ? 32 : 0;
    static constexpr int kData = 32 + kOffsets;  // where the integers begin
    static constexpr int kWordWeights = FORMAT == PHLOEM_W_Q8_0 ? 2 : 4;
    static constexpr int kGroups = kBlockWeights / (2 * kWordWeights);
    static constexpr int kBytes = kData + kGroups * 64;
};

#if defined(__AVX2__)
// Pair t of a word: 16 integers, two of k for each of 8 columns.
template <int FORMAT> PHLOEM_INLINE __m256i word_pair(__m256i words, int t) {
    if (FORMAT == PHLOEM_W_Q8_0) {
        if (t == 0) words = _mm256_slli_epi16(words, 8);
        return _mm256_srai_epi16(words, 8);
    }
    if (t > 0) words = _mm256_srli_epi16(words, 4 * t);
    return t == 3 ? words : _mm256_and_si256(words, _mm256_set1_epi16(15));
}

// gcc would first compute all products of a block and then add them as a tree: they do not fit
// registers, and that takes three times as long.
PHLOEM_INLINE void in_order(__m256i &sum) { __asm__("" : "+x"(sum)); }

PHLOEM_INLINE __m256 halves(const uint8_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

// out (MR rows of 16) = x (MR rows of blocks) times one panel.
template <int FORMAT, int MR>
static void micro_blocks(const uint8_t *w, const XBlock *x, int64_t x_stride, int64_t blocks,
                         float *out) {
    using B = Block<FORMAT>;
    __m256 acc[MR][2] = {};
    for (int64_t b = 0; b < blocks; ++b, ++x, w += B::kBytes) {
#pragma GCC unroll 9
        for (int i = 0; i < B::kBytes; i += 64) __builtin_prefetch(w + kPrefetchBytes + i);
        __m256i sum[MR][2];
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) {
            const int32_t bias = FORMAT == PHLOEM_W_Q4_0 ? -8 * x[i * x_stride].total : 0;
            sum[i][0] = sum[i][1] = _mm256_set1_epi32(bias);
        }
#pragma GCC unroll 8
        for (int g = 0; g < B::kGroups; ++g) {
            const __m256i *at = (const __m256i *)(w + B::kData + 64 * g);
            const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
#pragma GCC unroll 4
            for (int t = 0; t < B::kWordWeights; ++t) {
                const __m256i first = word_pair<FORMAT>(low, t), second = word_pair<FORMAT>(high, t);
                const int k = 2 * (g * B::kWordWeights + t);
#pragma GCC unroll 4
                for (int i = 0; i < MR; ++i) {
                    int32_t both;
                    memcpy(&both, x[i * x_stride].q + k, 4);
                    const __m256i xv = _mm256_set1_epi32(both);
                    sum[i][0] = _mm256_add_epi32(sum[i][0], _mm256_madd_epi16(first, xv));
                    sum[i][1] = _mm256_add_epi32(sum[i][1], _mm256_madd_epi16(second, xv));
                    in_order(sum[i][0]);
                    in_order(sum[i][1]);
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m256 scale = halves(w + 16 * h);
#pragma GCC unroll 4
            for (int i = 0; i < MR; ++i) {
                const XBlock &xb = x[i * x_stride];
                acc[i][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][h]),
                                            _mm256_mul_ps(scale, _mm256_set1_ps(xb.scale)),
                                            acc[i][h]);
                if (FORMAT == PHLOEM_W_Q4_1)
                    acc[i][h] = _mm256_fmadd_ps(halves(w + 32 + 16 * h), _mm256_set1_ps(xb.sum),
                                                acc[i][h]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
        _mm256_storeu_ps(out + i * kPanel, acc[i][0]);
        _mm256_storeu_ps(out + i * kPanel + 8, acc[i][1]);
    }
}
#endif

// Weight k of column c of a block, as an integer.
template <int FORMAT> PHLOEM_INLINE int block_integer(const uint8_t *block, int c, int k) {
    using B = Block<FORMAT>;
    const int g = k / (2 * B::kWordWeights), t = k / 2 % B::kWordWeights, s = k % 2;
    const uint8_t *word = block + B::kData + 64 * g + 4 * c + 2 * s;  // two halves of 8 columns
    if (FORMAT == PHLOEM_W_Q8_0) return (int8_t)word[t];
    return (word[t / 2] >> (t % 2 * 4) & 15) - (FORMAT == PHLOEM_W_Q4_0 ? 8 : 0);
}

#if !defined(__AVX2__)
template <int FORMAT, int MR>
static void micro_blocks(const uint8_t *w, const XBlock *x, int64_t x_stride, int64_t blocks,
                         float *out) {
    using B = Block<FORMAT>;
    float acc[MR][kPanel] = {};
    for (int64_t b = 0; b < blocks; ++b, ++x, w += B::kBytes)
        for (int c = 0; c < kPanel; ++c) {
            int q[kBlockWeights];
            for (int k = 0; k < kBlockWeights; ++k) q[k] = block_integer<FORMAT>(w, c, k);
            const float scale = half_to_float(w + 2 * c);
            const float offset = FORMAT == PHLOEM_W_Q4_1 ? half_to_float(w + 32 + 2 * c) : 0.0f;
            for (int i = 0; i < MR; ++i) {
                const XBlock &xb = x[i * x_stride];
                int32_t sum = 0;
                for (int k = 0; k < kBlockWeights; ++k) sum += q[k] * xb.q[k];
                acc[i][c] += (float)sum * (scale * xb.scale);
                if (FORMAT == PHLOEM_W_Q4_1) acc[i][c] += offset * xb.sum;
            }
        }
    memcpy(out, acc, sizeof acc);
}
#endif

constexpr int kBlockRows = kMR < 4 ? kMR : 4;  // 8 sums, and room for weights, of 16 registers

template <int FORMAT, int MR = kBlockRows>
PHLOEM_INLINE void micro_blocks_rows(int64_t rows, const uint8_t *w, const XBlock *x,
                                     int64_t blocks, float *out) {
    if constexpr (MR > 1) {
        if (rows < MR) {
            micro_blocks_rows<FORMAT, MR - 1>(rows, w, x, blocks, out);
            return;
        }
    }
    micro_blocks<FORMAT, MR>(w, x, blocks, blocks, out);
}

template <int FORMAT> static void gemm_blocks_format(const GemmTask &task, const XBlock *xq) {
    const int64_t blocks = ceil_div(task.w->k, kBlockWeights);
    const int64_t panel_bytes = blocks * Block<FORMAT>::kBytes;
    const Epilogue epilogue{task};
    alignas(64) float tiles[2 * kMR * kPanel];
    for (int64_t p = task.panel0; p < task.panel1; p += 2) {
        const int64_t panels = imin<int64_t>(2, task.panel1 - p);
        const uint8_t *w = (const uint8_t *)task.w->data + p * panel_bytes;
        for (int64_t i = 0; i < task.m; i += kBlockRows) {
            const int64_t rows = imin<int64_t>(kBlockRows, task.m - i);
            for (int64_t j = 0; j < panels; ++j)
                micro_blocks_rows<FORMAT>(rows, w + j * panel_bytes, xq + i * blocks, blocks,
                                          tiles + j * kMR * kPanel);
            epilogue.rows(tiles, i, rows, p, panels);
        }
    }
}

static void gemm_blocks(const GemmTask &task, const void *xq) {
    const XBlock *x = (const XBlock *)xq;
    switch (task.w->format) {
        case PHLOEM_W_Q4_0: gemm_blocks_format<PHLOEM_W_Q4_0>(task, x); break;
        case PHLOEM_W_Q4_1: gemm_blocks_format<PHLOEM_W_Q4_1>(task, x); break;
        default: gemm_blocks_format<PHLOEM_W_Q8_0>(task, x); break;
    }
}

// ---- rows of packed weights, for embeddings ----

template <int FORMAT> static void block_row(const uint8_t *panel, int c, int64_t k, float *out) {
    using B = Block<FORMAT>;
    for (int64_t at = 0; at < k; at += kBlockWeights, panel += B::kBytes) {
        const float scale = half_to_float(panel + 2 * c);
        const float offset = FORMAT == PHLOEM_W_Q4_1 ? half_to_float(panel + 32 + 2 * c) : 0.0f;
        const int n = (int)imin<int64_t>(kBlockWeights, k - at);
        for (int i = 0; i < n; ++i)
            out[at + i] = scale * (float)block_integer<FORMAT>(panel, c, i) + offset;
    }
}

static void weight_row(const phloem_weight &w, int64_t row, float *out) {
    const int c = (int)(row % kPanel);
    const char *panel = (const char *)w.data + row / kPanel * panel_bytes(w.format, w.k);
    switch (w.format) {
        case PHLOEM_W_F32:
            for (int64_t i = 0; i < w.k; ++i) out[i] = ((const float *)panel)[i * kPanel + c];
            break;
        case PHLOEM_W_BF16:
            for (int64_t i = 0; i < w.k; ++i)
                out[i] = get((const uint16_t *)panel + (i / 2 * kPanel + c) * 2 + i % 2);
            break;
        case PHLOEM_W_Q4_0: block_row<PHLOEM_W_Q4_0>((const uint8_t *)panel, c, w.k, out); break;
        case PHLOEM_W_Q4_1: block_row<PHLOEM_W_Q4_1>((const uint8_t *)panel, c, w.k, out); break;
        default: block_row<PHLOEM_W_Q8_0>((const uint8_t *)panel, c, w.k, out); break;
    }
}

static void embedding(const int32_t *ids, const phloem_weight &w, void *y, int32_t y_dtype,
                      int64_t m, float *row) {
    for (int64_t i = 0; i < m; ++i) {
        weight_row(w, ids[i], y_dtype == PHLOEM_F32 ? (float *)y + i * w.k : row);
        if (y_dtype == PHLOEM_F32) continue;
        for (int64_t k = 0; k < w.k; ++k) put((uint16_t *)y + i * w.k + k, row[k]);
    }
}

}  // namespace PHLOEM_NS
}  // namespace phloem
