// Packing of rows. Compiled without fused multiply-adds: every rounding is PyTorch's.
#pragma once
#include "codec.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

PHLOEM_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
PHLOEM_INLINE float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

// The greatest |x|, a NaN if there is one: sizes grow with their bits.
static float greatest(const float *x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t size = bits_of(x[i]) & 0x7fffffffu;
        top = size > top ? size : top;
    }
    return float_of(top);
}

// Two bytes behind the codes: the least bf16 number that is not below greatest / most.
static float put_scale(const float *x, int64_t n, float most, uint8_t *out) {
    const uint32_t exact = bits_of(greatest(x, n) / most);
    const uint16_t up = exact > 0x7f800000u ? 0x7fc0 : (uint16_t)((exact + 0xffffu) >> 16);
    memcpy(out, &up, 2);
    const float scale = float_of((uint32_t)up << 16);
    return scale > 0.0f ? scale : 1.0f;
}

static void pack_int8(const float *x, int64_t n, uint8_t *out) {
    const float scale = put_scale(x, n, 127.0f, out + n);
    for (int64_t i = 0; i < n; ++i) {
        float u = x[i] / scale;
        u = u > -127.0f ? u : -127.0f;
        u = u < 127.0f ? u : 127.0f;
        // Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low bits.
        out[i] = (uint8_t)bits_of(u + 12582912.0f);
    }
}

static void pack_fp8(const float *x, int64_t n, uint8_t *out) {
    const float scale = put_scale(x, n, 448.0f, out + n);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t all = bits_of(x[i] / scale), sign = all >> 24 & 0x80u;
        uint32_t size = all & 0x7fffffffu;
        const bool nan = size > 0x7f800000u;
        size = size > 0x43e00000u ? 0x43e00000u : size;  // 448
        // Below 2^-6 a step is 2^-9, that of fp32 at 2^14; else 20 bits are rounded off.
        const uint32_t small = bits_of(float_of(size) + 16384.0f) - 0x46800000u;
        const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
        const uint32_t code = size < 0x3c800000u ? small : normal;
        out[i] = (uint8_t)(sign | (nan ? 0x7fu : code));
    }
}

// fp16 by its bits, rounded to even; 0 <= x <= 61440, or a NaN.
static uint32_t half_bits(float x) {
    const uint32_t u = bits_of(x);
    if (u > 0x7f800000u) return 0x7e00u;
    if (u < 0x38800000u) return bits_of(x + 0.5f) - 0x3f000000u;  // a step is 2^-24
    return ((u + 0xfffu + (u >> 13 & 1u)) >> 13) - (112u << 10);
}

// A scale of fp4: fp16 without its sign and its last seven bits.
PHLOEM_INLINE float e5m3(uint32_t code) {
    const uint32_t exponent = code >> 3, mantissa = code & 7u;
    if (exponent == 0) return (float)mantissa * 7.62939453125e-6f;  // 2^-17
    if (exponent == 31) return float_of(0x7f800000u | mantissa << 20);
    return float_of((exponent + 112u) << 23 | mantissa << 20);
}

// The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 to sizes in units of `scale` (0: all are 0).
static void nearest_fp4(const float *sizes, float scale, float *held) {
    const float unit = scale > 0.0f ? scale : __builtin_inff();
    for (int i = 0; i < kFp4Block; ++i) {
        const float u = sizes[i] / unit;
        const float step = u < 2.0f ? 0.5f : u < 4.0f ? 1.0f : 2.0f;
        float h = __builtin_floorf(u / step + 0.5f) * step;
        held[i] = h > 6.0f ? 6.0f : h;
    }
}

static float fp4_error(const float *sizes, float scale) {
    float e[kFp4Block];
    nearest_fp4(sizes, scale, e);
    for (int i = 0; i < kFp4Block; ++i) {
        const float off = e[i] * scale - sizes[i];
        e[i] = off * off;
    }
    for (int n = kFp4Block / 2; n > 0; n /= 2)  // in this order, as codec.py has it
        for (int i = 0; i < n; ++i) e[i] += e[i + n];
    return e[0];
}

// Of a few scales near that of the greatest number the one that leaves the least error.
static uint32_t best_fp4_scale(const float *sizes) {
    float exact = greatest(sizes, kFp4Block) / 6.0f;
    exact = exact > 61440.0f ? 61440.0f : exact;
    const int32_t first = (int32_t)((half_bits(exact) + 64u) >> 7);
    uint32_t best = (uint32_t)first;
    float least = fp4_error(sizes, e5m3(best));
    for (int32_t step = -1; step <= 5; ++step) {
        if (step == 0) continue;
        const uint32_t tried = (uint32_t)imin(imax(first + step, 0), 0xf7);
        const float error = fp4_error(sizes, e5m3(tried));
        if (error < least) best = tried, least = error;
    }
    return best;
}

static void pack_fp4(const float *x, int64_t n, uint8_t *out) {
    uint8_t *scales = out + n / 2;
    for (int64_t at = 0; at < n; at += kFp4Block, out += kFp4Block / 2) {
        float sizes[kFp4Block], held[kFp4Block];
        for (int i = 0; i < kFp4Block; ++i) sizes[i] = __builtin_fabsf(x[at + i]);
        const uint32_t scale = best_fp4_scale(sizes);
        *scales++ = (uint8_t)scale;
        nearest_fp4(sizes, e5m3(scale), held);
        uint8_t codes[kFp4Block];
        for (int i = 0; i < kFp4Block; ++i) {
            const float h = held[i];
            const int code = h <= 2.0f ? (int)(2.0f * h) : h <= 4.0f ? (int)h + 2 : 7;
            codes[i] = (uint8_t)(code + (x[at + i] < 0.0f ? 8 : 0));
        }
        for (int i = 0; i < kFp4Block; i += 2) out[i / 2] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
}

static void pack_part(int32_t dtype, const float *x, int64_t n, uint8_t *out) {
    if (dtype == PHLOEM_KV_INT8) pack_int8(x, n, out);
    else if (dtype == PHLOEM_KV_FP8) pack_fp8(x, n, out);
    else pack_fp4(x, n, out);
}

void pack_row(const phloem_kv_layer &kv, const float *x, uint8_t *out) {
    const int64_t lead = lead_dim(kv);
    pack_part(kv.dtype, x, lead, out);
    if (kv.tail_dim > 0)
        pack_part(kv.dtype, x + lead, kv.tail_dim, out + part_items(kv.dtype, lead));
}

}  // namespace PHLOEM_NS
}  // namespace phloem
