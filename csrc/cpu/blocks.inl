// y = x W^T where W stays in GGUF blocks of 32 weights (Q4_0, Q4_1, Q8_0), read as they are.
//
// Few rows: activations become 16-bit integers with a scale per block (error 2^-16 of the block's
// greatest, below what bf16 activations lose already), so one instruction does 16 products.
// Many rows (api.cpp): panels of 16 columns are widened to f32 once and go through gemm.inl.
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

// The 32 weights of a block as integers, and value = scale * integer + offset.
static void block_integers(const uint8_t *block, int32_t format, int8_t *q, float *scale,
                           float *offset) {
    *scale = half_to_float(block);
    *offset = 0.0f;
    if (format == PHLOEM_W_Q8_0) {
        memcpy(q, block + 2, 32);
        return;
    }
    const int bias = format == PHLOEM_W_Q4_0 ? 8 : 0;
    const uint8_t *nibbles = block + (format == PHLOEM_W_Q4_0 ? 2 : 4);
    if (format == PHLOEM_W_Q4_1) *offset = half_to_float(block + 2);
    for (int i = 0; i < 16; ++i) {
        q[i] = (int8_t)((nibbles[i] & 15) - bias);
        q[i + 16] = (int8_t)((nibbles[i] >> 4) - bias);
    }
}

// Columns row0 ... row0 + rows - 1 (<= 16) as one f32 panel [k][16]; missing columns are zero.
static void dequantize(const phloem_weight &w, int64_t row0, int64_t rows, float *out) {
    const int64_t bytes = block_bytes(w.format), blocks = w.k / kBlockWeights;
    for (int64_t c = 0; c < kPanel; ++c) {
        const uint8_t *at = (const uint8_t *)w.data + (row0 + c) * blocks * bytes;
        for (int64_t b = 0; b < blocks; ++b, at += bytes) {
            int8_t q[32] = {};
            float scale = 0.0f, offset = 0.0f;
            if (c < rows) block_integers(at, w.format, q, &scale, &offset);
            float *to = out + b * kBlockWeights * kPanel + c;
            for (int i = 0; i < 32; ++i) to[i * kPanel] = scale * q[i] + offset;
        }
    }
}

struct alignas(8) XBlock {
    int16_t q[32];
    float scale, sum;  // sum: of the 32 activations as rounded
};
static_assert(sizeof(XBlock) == kXqBytes, "XBlock size");

static void quantize_x(const float *x, int64_t k, void *xq) {
    XBlock *out = (XBlock *)xq;
    for (int64_t b = 0; b < k / kBlockWeights; ++b, x += kBlockWeights) {
        float top = 0.0f;
        bool finite = true;
        for (int i = 0; i < 32; ++i) {
            float a = x[i] < 0 ? -x[i] : x[i];
            finite &= a <= 3.0e38f;
            top = imax(top, a);
        }
        const float inverse = top > 0.0f && finite ? 32767.0f / top : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < 32; ++i) {
            float r = finite ? x[i] * inverse : 0.0f;
            int32_t q = (int32_t)(r + (r < 0 ? -0.5f : 0.5f));
            out[b].q[i] = (int16_t)q;
            sum += q;
        }
        // NaN or inf in x must show in the result.
        out[b].scale = finite ? top / 32767.0f : __builtin_nanf("");
        out[b].sum = (float)sum * out[b].scale;
    }
}

#if defined(__AVX2__)
struct Weights16 {
    __m256i low, high;  // 16 + 16 weights as int16
};
template <int FORMAT> PHLOEM_INLINE Weights16 block_weights(const uint8_t *block) {
    if (FORMAT == PHLOEM_W_Q8_0) {
        __m256i q = _mm256_loadu_si256((const __m256i *)(block + 2));
        return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)),
                _mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1))};
    }
    __m128i q = _mm_loadu_si128((const __m128i *)(block + (FORMAT == PHLOEM_W_Q4_0 ? 2 : 4)));
    const __m128i mask = _mm_set1_epi8(15);
    __m128i low = _mm_and_si128(q, mask), high = _mm_and_si128(_mm_srli_epi16(q, 4), mask);
    if (FORMAT == PHLOEM_W_Q4_0) {
        low = _mm_sub_epi8(low, _mm_set1_epi8(8));
        high = _mm_sub_epi8(high, _mm_set1_epi8(8));
    }
    return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
}

template <int FORMAT, int MR>
static void dot_blocks(const uint8_t *w, const XBlock *x, int64_t x_stride, int64_t blocks,
                       float *out, int64_t out_stride) {
    __m256 acc[MR] = {};
    float offset[MR] = {};
    for (int64_t b = 0; b < blocks; ++b, w += block_bytes(FORMAT)) {
        const Weights16 q = block_weights<FORMAT>(w);
        const float d = half_to_float(w);
        const float m = FORMAT == PHLOEM_W_Q4_1 ? half_to_float(w + 2) : 0.0f;
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) {
            const XBlock &xb = x[i * x_stride + b];
            const __m256i *xv = (const __m256i *)xb.q;
            __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(q.low, _mm256_loadu_si256(xv)),
                                           _mm256_madd_epi16(q.high, _mm256_loadu_si256(xv + 1)));
            acc[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(d * xb.scale), acc[i]);
            if (FORMAT == PHLOEM_W_Q4_1) offset[i] += m * xb.sum;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(acc[i]), _mm256_extractf128_ps(acc[i], 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        out[i * out_stride] = _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1))) + offset[i];
    }
}
#else
template <int FORMAT, int MR>
static void dot_blocks(const uint8_t *w, const XBlock *x, int64_t x_stride, int64_t blocks,
                       float *out, int64_t out_stride) {
    float acc[MR] = {};
    for (int64_t b = 0; b < blocks; ++b, w += block_bytes(FORMAT)) {
        int8_t q[32];
        float scale, offset;
        block_integers(w, FORMAT, q, &scale, &offset);
        for (int i = 0; i < MR; ++i) {
            const XBlock &xb = x[i * x_stride + b];
            int32_t sum = 0;
            for (int j = 0; j < 32; ++j) sum += q[j] * xb.q[j];
            acc[i] += (float)sum * (scale * xb.scale) + offset * xb.sum;
        }
    }
    for (int i = 0; i < MR; ++i) out[i * out_stride] = acc[i];
}
#endif

template <int FORMAT> static void gemm_blocks_format(const GemmTask &task, const XBlock *xq) {
    const int64_t blocks = task.w->k / kBlockWeights;
    const int64_t row_bytes = blocks * block_bytes(FORMAT);
    const Epilogue epilogue{task};
    alignas(64) float tiles[2 * kMR * kPanel];
    for (int64_t p = task.panel0; p < task.panel1; p += 2) {
        const int64_t panels = imin<int64_t>(2, task.panel1 - p);
        for (int64_t i = 0; i < task.m; i += 2) {
            const int64_t rows = imin<int64_t>(2, task.m - i);
            for (int64_t j = 0; j < panels; ++j)
                for (int64_t c = 0; c < epilogue.width(p + j); ++c) {
                    const uint8_t *w =
                        (const uint8_t *)task.w->data + ((p + j) * kPanel + c) * row_bytes;
                    float *out = tiles + j * kMR * kPanel + c;
                    const XBlock *x = xq + i * blocks;
                    if (rows == 2) dot_blocks<FORMAT, 2>(w, x, blocks, blocks, out, kPanel);
                    else dot_blocks<FORMAT, 1>(w, x, blocks, blocks, out, kPanel);
                }
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

}  // namespace PHLOEM_NS
}  // namespace phloem
