// Vectors of W floats for whatever instruction set this unit is compiled for.
//
// Written with GCC/Clang vector extensions, so that one source serves AVX-512, AVX2, SSE2, NEON.
// Everything lives in a namespace per instruction set: an inline function compiled with -mavx2
// must never be the copy that the linker keeps for a plain unit (PHLOEM_NS is the unit's own). For the same reason no inline
// function of the standard library is called here.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define PHLOEM_W 16
#elif defined(__AVX2__)
#define PHLOEM_W 8
#else
#define PHLOEM_W 4
#endif
#define PHLOEM_INLINE static inline __attribute__((always_inline))

namespace phloem {
namespace PHLOEM_NS {

constexpr int W = PHLOEM_W;
constexpr int kPanel = 16;       // columns of a packed weight panel
constexpr int NV = kPanel / W;   // vectors of a panel row
#if defined(__AVX512F__)
constexpr int kMR = 8, kNP = 2;  // 16 accumulators of 32 registers, 2 panels
#elif defined(__AVX2__)
constexpr int kMR = 6, kNP = 1;  // 12 accumulators of 16 registers
#else
constexpr int kMR = 2, kNP = 1;
#endif

typedef float vf __attribute__((vector_size(4 * PHLOEM_W)));
typedef int32_t vi __attribute__((vector_size(4 * PHLOEM_W)));
typedef uint32_t vu __attribute__((vector_size(4 * PHLOEM_W)));
typedef uint16_t vh __attribute__((vector_size(2 * PHLOEM_W)));
typedef int8_t vb __attribute__((vector_size(PHLOEM_W)));

template <class T> PHLOEM_INLINE T imin(T a, T b) { return a < b ? a : b; }
template <class T> PHLOEM_INLINE T imax(T a, T b) { return a > b ? a : b; }

PHLOEM_INLINE vf set1(float x) { return x - vf{}; }
PHLOEM_INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
PHLOEM_INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
// gcc 12 turns __builtin_convertvector into twice the instructions here: intrinsics where known.
PHLOEM_INLINE vf load(const uint16_t *p) {
#if defined(__AVX512F__)
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
#elif defined(__AVX2__)
    __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
#endif
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
// Of 2 W numbers side by side the even ones, or the odd ones: half the instructions of two loads.
template <int ODD> PHLOEM_INLINE vf load_half(const uint16_t *p) {
    vu u;
    memcpy(&u, p, sizeof u);
    return ODD ? (vf)(u & 0xffff0000u) : (vf)(u << 16);
}
// load_half<1> that leaves its mask in memory: for loops that need all of 16 registers.
PHLOEM_INLINE vf load_odd(const uint16_t *p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    static const vu mask = vu{} + 0xffff0000u;
    vf x;
    memcpy(&x, p, sizeof x);
    __asm__("vpand %1, %0, %0" : "+x"(x) : "m"(mask));
    return x;
#else
    return load_half<1>(p);
#endif
}
PHLOEM_INLINE vf load(const int8_t *p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#endif
    vb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
}
// a*b + c as the separate terms say; -ffp-contract=fast makes it one instruction where there is one.
PHLOEM_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
// The second operand if either is NaN, as maxps does.
PHLOEM_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}
PHLOEM_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
PHLOEM_INLINE vi iota() {
    vi v;
    for (int i = 0; i < W; ++i) v[i] = i;
    return v;
}

// Round to nearest even; a NaN stays a (quiet) NaN.
PHLOEM_INLINE uint16_t to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
PHLOEM_INLINE float from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
PHLOEM_INLINE void store(uint16_t *p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu quiet = (u >> 16) | 0x40u;
    vu r = v == v ? rounded : quiet;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)r));
#elif defined(__AVX2__)
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)r, (__m256i)r), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
#else
    vh h = __builtin_convertvector(r, vh);
    memcpy(p, &h, sizeof h);
#endif
}

PHLOEM_INLINE float hsum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#elif defined(__AVX2__)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
#if defined(__AVX2__)
// y[c * y_stride + r] = x[r * x_stride + c], 8 by 8.
PHLOEM_INLINE void transpose8(const float *x, int64_t x_stride, float *y, int64_t y_stride) {
    __m256 pair[8], four[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        const __m256 a = _mm256_loadu_ps(x + i * x_stride);
        const __m256 b = _mm256_loadu_ps(x + (i + 1) * x_stride);
        pair[i] = _mm256_unpacklo_ps(a, b);
        pair[i + 1] = _mm256_unpackhi_ps(a, b);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            four[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
            four[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m256 a = four[i], b = four[i + 4];
        _mm256_storeu_ps(y + i * y_stride, _mm256_permute2f128_ps(a, b, 0x20));
        _mm256_storeu_ps(y + (i + 4) * y_stride, _mm256_permute2f128_ps(a, b, 0x31));
    }
}
#endif
// y[c * y_stride + r] = x[r * x_stride + c] for all rows and columns of x.
static inline void transpose(const float *x, int64_t x_stride, int64_t rows, int64_t columns,
                             float *y, int64_t y_stride) {
    int64_t whole_rows = 0, whole = 0;
#if defined(__AVX2__)
    whole_rows = rows / 8 * 8;
    whole = columns / 8 * 8;
    for (int64_t r = 0; r < whole_rows; r += 8)
        for (int64_t c = 0; c < whole; c += 8)
            transpose8(x + r * x_stride + c, x_stride, y + c * y_stride + r, y_stride);
#endif
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = r < whole_rows ? whole : 0; c < columns; ++c)
            y[c * y_stride + r] = x[r * x_stride + c];
}
// The sums of four vectors.
typedef float v4 __attribute__((vector_size(16)));
PHLOEM_INLINE v4 hsums(const vf (&v)[4]) {
#if defined(__AVX2__)
    __m256 x[4];
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
        x[i] = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
#else
        x[i] = v[i];
#endif
    }
    __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
    __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
    __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
#else
    return v4{hsum(v[0]), hsum(v[1]), hsum(v[2]), hsum(v[3])};
#endif
}
// Of a NaN among the numbers nothing is known.
PHLOEM_INLINE float hmax(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#elif defined(__AVX2__)
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
#else
    float m = v[0];
    for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// e^c for c from -87 to 88.3, relative error below 2e-7.
PHLOEM_INLINE vf exp_inside(vf c) {
    // Adding 1.5 * 2^23 rounds to an integer that can be read from the low bits.
    const vf magic = set1(12582912.0f);
    vf t = fma(c, set1(1.44269504088896341f), magic);
    vi n = (vi)t - (vi)magic;
    vf k = t - magic;
    vf r = fma(k, set1(-0.693359375f), c);
    r = fma(k, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    return (vf)((vi)p + (n << 23));
}
// e^x; exactly 0 below -87 (so also for -inf), inf above 88, NaN for NaN.
PHLOEM_INLINE vf vexp(vf x) {
    const vf low = set1(-87.0f), high = set1(88.3f);
    vf c = x < low ? low : x;
    c = c > high ? high : c;
    vf e = exp_inside(c);
    e = x < low ? vf{} : e;
    e = x > high ? set1(__builtin_inff()) : e;
    return x == x ? e : x;
}
// The same for x <= 0, or a NaN: to the bit.
PHLOEM_INLINE vf vexp_down(vf x) {
    const vf low = set1(-87.0f);
    vf e = exp_inside(vmax(low, x));
    e = x < low ? vf{} : e;
    return x == x ? e : x;
}
// 2^x for x below 127, or a NaN; relative error below 2e-7, exactly 0 from -127 down.
PHLOEM_INLINE vf vexp2(vf x) {
    // As in exp_inside, but what the low bits say is the exponent as floats keep it, 0 for -127, and
    // a factor: so the product is NaN for NaN, and nothing is left to be selected.
    const vf magic = set1(12582912.0f + 127.0f);
    vf c = vmax(set1(-127.0f), x);
    vf t = c + magic;
    vf r = c - (t - magic);
    // Even and odd powers apart: the chain is what takes long.
    vf square = r * r;
    vf high = fma(set1(1.326472691e-3f), r, set1(9.671512660e-3f));
    vf middle = fma(set1(5.550733744e-2f), r, set1(2.402224208e-1f));
    vf p = fma(set1(6.931469776e-1f), r, set1(1.0f));
    p = fma(fma(high, square, middle), square, p);
    return p * (vf)((vi)t << 23);
}
PHLOEM_INLINE vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }
// 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), u the usual cubic.
PHLOEM_INLINE vf vgelu_tanh(vf x) {
    vf u = x * fma(x * x, set1(0.044715f), set1(1.0f)) * 0.797884560802865356f;
    return x / (1.0f + vexp(-2.0f * u));
}
// Relative error below 3e-7: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) cancels.
PHLOEM_INLINE vf vtanh(vf x) {
    vf z = x * x;
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    vf far = 1.0f - 2.0f / (1.0f + vexp(2.0f * x));
    return select(z < 0.390625f, fma(p * z, x, x), far);
}

// Element access for either dtype, scalar and vector.
PHLOEM_INLINE float get(const float *p) { return *p; }
PHLOEM_INLINE float get(const uint16_t *p) { return from_bf16(*p); }
PHLOEM_INLINE void put(float *p, float x) { *p = x; }
PHLOEM_INLINE void put(uint16_t *p, float x) { *p = to_bf16(x); }
PHLOEM_INLINE float scalar_exp(float x) { return vexp(set1(x))[0]; }

}  // namespace PHLOEM_NS
}  // namespace phloem
