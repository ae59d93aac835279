// How rows of pages are read: one type per format, with the same few functions.
//
//   load(row, n, c)   numbers c ... c + W - 1 of a part of n numbers (c a multiple of W)
//   half<V>(row, n, c)  vector V, 0 or 1, of numbers c ... c + 2 W - 1; where kInterleaved the even
//                     ones and the odd ones, else the first ones and the last ones
//   get(row, n, c)    one of them
//   scale(row, n)     what all of them are still to be multiplied with; 1 where !kScaled
//
// Nothing outside of the part is read. fp8's code 0x7F, a NaN, reads as 480: it is written only
// where the scale is a NaN as well.
#pragma once
#include "codec.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

template <class T> struct Numbers {
    typedef T Item;
    static constexpr bool kScaled = false, kInterleaved = sizeof(T) == 2;
    PHLOEM_INLINE vf load(const T *row, int64_t, int64_t c) { return PHLOEM_NS::load(row + c); }
    template <int V> PHLOEM_INLINE vf half(const T *row, int64_t, int64_t c) {
        if constexpr (kInterleaved) return load_half<V>(row + c);
        else return PHLOEM_NS::load(row + c + V * W);
    }
    PHLOEM_INLINE float get(const T *row, int64_t, int64_t c) { return PHLOEM_NS::get(row + c); }
    PHLOEM_INLINE float scale(const T *, int64_t) { return 1.0f; }
};

// What the packed formats have in common.
template <class R> struct InOrder {
    static constexpr bool kInterleaved = false;
    template <int V> PHLOEM_INLINE vf half(const uint8_t *row, int64_t n, int64_t c) {
        return R::load(row, n, c + V * W);
    }
};

PHLOEM_INLINE float bf16_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return from_bf16(h);
}

struct Int8Rows : InOrder<Int8Rows> {
    typedef uint8_t Item;
    static constexpr bool kScaled = true;
    PHLOEM_INLINE vf load(const uint8_t *row, int64_t, int64_t c) {
        return PHLOEM_NS::load((const int8_t *)row + c);
    }
    PHLOEM_INLINE float get(const uint8_t *row, int64_t, int64_t c) {
        return (float)(int8_t)row[c];
    }
    PHLOEM_INLINE float scale(const uint8_t *row, int64_t n) { return bf16_at(row + n); }
};

// A code of e4m3, shifted into fp16's place, is 2^-8 of its number: the scale makes up for it.
struct Fp8Rows : InOrder<Fp8Rows> {
    typedef uint8_t Item;
    static constexpr bool kScaled = true;
    PHLOEM_INLINE vf load(const uint8_t *row, int64_t, int64_t c) {
#if defined(__AVX512F__)
        __m256i wide = _mm256_slli_epi16(
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(row + c))), 7);
        return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__)
        __m128i wide =
            _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(row + c))), 7);
        return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbfff)));
#else
        vb codes;
        memcpy(&codes, row + c, sizeof codes);
        vu wide = (vu)__builtin_convertvector(codes, vi) << 20;
        return (vf)(wide & 0x87f00000u) * 5.192296858534828e33f;  // 2^112
#endif
    }
    PHLOEM_INLINE float get(const uint8_t *row, int64_t, int64_t c) {
        const uint32_t wide = (row[c] & 0x80u) << 24 | (row[c] & 0x7fu) << 20;
        float x;
        memcpy(&x, &wide, 4);
        return x * 5.192296858534828e33f;
    }
    PHLOEM_INLINE float scale(const uint8_t *row, int64_t n) {
        return bf16_at(row + n) * 256.0f;
    }
};

// Twice the numbers of fp4's codes, which are integers; a scale is halved.
alignas(16) static const int8_t kTwiceFp4[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                 0, -1, -2, -3, -4, -6, -8, -12};

struct Fp4Rows : InOrder<Fp4Rows> {
    typedef uint8_t Item;
    static constexpr bool kScaled = false;
    PHLOEM_INLINE float block_scale(const uint8_t *row, int64_t n, int64_t c) {
        const uint32_t code = row[n / 2 + c / kFp4Block];
#if defined(__AVX2__)
        return 0.5f * _cvtsh_ss((unsigned short)(code << 7));
#else
        const uint32_t exponent = code >> 3, mantissa = code & 7u;
        if (exponent == 0) return (float)mantissa * 3.814697265625e-6f;  // 2^-18
        uint32_t bits = (exponent + 111u) << 23 | mantissa << 20;
        if (exponent == 31) bits = 0x7f800000u | mantissa << 20;
        float x;
        memcpy(&x, &bits, 4);
        return x;
#endif
    }
    PHLOEM_INLINE vf load(const uint8_t *row, int64_t n, int64_t c) {
        const float scale = block_scale(row, n, c);
#if defined(__AVX2__)
        uint64_t bytes = 0;
        memcpy(&bytes, row + c / 2, W / 2);
        const __m128i both = _mm_cvtsi64_si128((int64_t)bytes), low = _mm_set1_epi8(15);
        const __m128i codes = _mm_unpacklo_epi8(
            _mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
        const __m128i twice = _mm_shuffle_epi8(_mm_load_si128((const __m128i *)kTwiceFp4), codes);
#if defined(__AVX512F__)
        return scale * _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(twice));
#else
        return scale * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(twice));
#endif
#else
        vf x;
        for (int i = 0; i < W; ++i) x[i] = (float)twice(row, c + i);
        return scale * x;
#endif
    }
    PHLOEM_INLINE int8_t twice(const uint8_t *row, int64_t c) {
        return kTwiceFp4[row[c / 2] >> (c % 2 ? 4 : 0) & 15];
    }
    PHLOEM_INLINE float get(const uint8_t *row, int64_t n, int64_t c) {
        return block_scale(row, n, c) * (float)twice(row, c);
    }
    PHLOEM_INLINE float scale(const uint8_t *, int64_t) { return 1.0f; }
};

// Numbers c0 ... c0 + width - 1 of a part of n, as they are; c0 is a multiple of W.
template <class R>
PHLOEM_INLINE void unpack(const typename R::Item *row, int64_t n, int64_t c0, int64_t width,
                          float *out) {
    const float scale = R::scale(row, n);
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        vf x = R::load(row, n, c0 + i);
        store(out + i, R::kScaled ? x * scale : x);
    }
    for (; i < width; ++i) {
        const float x = R::get(row, n, c0 + i);
        out[i] = R::kScaled ? x * scale : x;
    }
}

// A row of K: both of its parts.
template <class R>
PHLOEM_INLINE void unpack_row(const phloem_kv_layer &kv, const typename R::Item *row, float *out) {
    const int64_t lead = lead_dim(kv);
    unpack<R>(row, lead, 0, lead, out);
    if (kv.tail_dim > 0)
        unpack<R>(row + part_items(kv.dtype, lead), kv.tail_dim, 0, kv.tail_dim, out + lead);
}

// f(R{}) with the format of the pool's rows.
template <class F> PHLOEM_INLINE void with_rows(const phloem_kv_layer &kv, const F &f) {
    switch (kv.dtype) {
        case PHLOEM_F32: return f(Numbers<float>{});
        case PHLOEM_BF16: return f(Numbers<uint16_t>{});
        case PHLOEM_KV_INT8: return f(Int8Rows{});
        case PHLOEM_KV_FP8: return f(Fp8Rows{});
        default: return f(Fp4Rows{});
    }
}

}  // namespace PHLOEM_NS
}  // namespace phloem
