// What the emulated instructions share: bf16 arithmetic as the hardware does it, and faults to order.
#pragma once
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

// Denormals count as zero, as operands and as results; the control register is not looked at.
PHLOEM_INLINE float flushed(float x) {
    return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}
PHLOEM_INLINE float flushed_fma(float a, float b, float c) {
    return flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(c)));
}
PHLOEM_INLINE float low_half(uint32_t pair) { return from_bf16((uint16_t)pair); }
PHLOEM_INLINE float high_half(uint32_t pair) { return from_bf16((uint16_t)(pair >> 16)); }

[[noreturn]] static inline void refuse(const char *why) {
    fprintf(stderr, "emulated processor: %s\n", why);
    abort();
}

// PHLOEM_EMULATED_FAULT="amx=crash,avx512bf16=wrong": what a broken path would do.
enum Fault { NO_FAULT, CRASH, WRONG, HANG };

static inline Fault read_fault(const char *path) {
    const char *text = getenv("PHLOEM_EMULATED_FAULT");
    const char *at = text ? strstr(text, path) : nullptr;
    if (!at || at[strlen(path)] != '=') return NO_FAULT;
    switch (at[strlen(path) + 1]) {
        case 'c': return CRASH;
        case 'w': return WRONG;
        case 'h': return HANG;
        default: return NO_FAULT;
    }
}

// The value that the instruction gives instead of x.
PHLOEM_INLINE float spoiled(Fault fault, float x) {
    if (fault == CRASH) raise(SIGILL);
    while (fault == HANG) pause();
    return fault == WRONG ? x * 1.0625f : x;
}

}  // namespace PHLOEM_NS
}  // namespace phloem
