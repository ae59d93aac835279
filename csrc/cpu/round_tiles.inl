// Activations as bf16 tiles (see tile_at), rounded once.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

// 32 numbers of k of one row.
PHLOEM_INLINE void round_piece(const float *x, uint16_t *out) {
    for (int v = 0; v < 32 / W; ++v) store(out + v * W, load(x + v * W));
}
PHLOEM_INLINE void round_piece(const uint16_t *x, uint16_t *out) { memcpy(out, x, 64); }

template <class T> PHLOEM_INLINE void round_rest(const T *x, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; ++i) put(out + i, get(x + i));
    for (int64_t i = n; i < kBf16Depth; ++i) out[i] = 0;
}

template <class T>
static void round_tiles_of(const T *x, int64_t x_stride, int64_t m, int64_t k, uint16_t *out) {
    const int64_t whole = k / kBf16Depth, blocks = ceil_div(k, kBf16Depth);
    for (int64_t row = 0; row < m; ++row, x += x_stride) {
        uint16_t *to = out + tile_at(row, 0, blocks);
        for (int64_t b = 0; b < whole; ++b)
            round_piece(x + b * kBf16Depth, to + b * kTileElements);
        if (whole < blocks)
            round_rest(x + whole * kBf16Depth, k - whole * kBf16Depth, to + whole * kTileElements);
    }
}

static void round_tiles(const void *x, int32_t dtype, int64_t x_stride, int64_t m, int64_t k,
                        uint16_t *out) {
    if (dtype == PHLOEM_F32) round_tiles_of((const float *)x, x_stride, m, k, out);
    else round_tiles_of((const uint16_t *)x, x_stride, m, k, out);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
