// y = x W^T with dot products of bf16 pairs: one instruction multiplies the two k of a pair that
// lie side by side in a panel and in a row of x.
#pragma once
#include "bf16.h"
#include "gemm.inl"

#if defined(PHLOEM_EMULATE)
#include "emulated_dot.h"
#else
namespace phloem {
namespace PHLOEM_NS {

// sum += x.low * w.low + x.high * w.high, per lane.
PHLOEM_INLINE vf dot_pairs(vf sum, vu x, vu w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
#endif

namespace phloem {
namespace PHLOEM_NS {

PHLOEM_INLINE vu load_pairs(const uint16_t *p) {
    vu u;
    memcpy(&u, p, sizeof u);
    return u;
}
PHLOEM_INLINE vu pair_of(const uint16_t *p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return u - vu{};
}

// out (NP panels, tile_panel apart, of MR rows of 16) = x (MR, 2 * pairs) times NP panels.
template <int MR, int NP>
static void micro_dot(const uint16_t *x, int64_t x_stride, const uint16_t *w, int64_t w_panel,
                      int64_t pairs, float *out, int64_t tile_panel) {
    vf sum[MR][NP * NV] = {};
    for (int64_t k = 0; k < pairs; ++k, x += 2, w += 2 * kPanel) {
#pragma GCC unroll 4
        for (int j = 0; j < NP; ++j)
            __builtin_prefetch((const char *)(w + j * w_panel) + kPrefetchBytes);
        vu b[NP * NV];
#pragma GCC unroll 16
        for (int j = 0; j < NP * NV; ++j)
            b[j] = load_pairs(w + (j / NV) * w_panel + 2 * (j % NV) * W);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const vu a = pair_of(x + i * x_stride);
#pragma GCC unroll 16
            for (int j = 0; j < NP * NV; ++j) sum[i][j] = dot_pairs(sum[i][j], a, b[j]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < NP * NV; ++j)
            store(out + (j / NV) * tile_panel + i * kPanel + (j % NV) * W, sum[i][j]);
}

constexpr int kDotRows = 8;  // 16 sums of 32 registers

template <int NP, int MR = kDotRows>
PHLOEM_INLINE void micro_dot_rows(int64_t rows, const uint16_t *x, int64_t x_stride,
                                  const uint16_t *w, int64_t w_panel, int64_t pairs, float *out) {
    if constexpr (MR > 1) {
        if (rows < MR) {
            micro_dot_rows<NP, MR - 1>(rows, x, x_stride, w, w_panel, pairs, out);
            return;
        }
    }
    micro_dot<MR, NP>(x, x_stride, w, w_panel, pairs, out, kDotRows * kPanel);
}

static void dot_gemm(const Kernels &, const GemmTask &task, const uint16_t *x, int64_t x_stride) {
    const int64_t pairs = ceil_div(task.w->k, 2), w_panel = panel_bytes(PHLOEM_W_BF16, task.w->k) / 2;
    const int64_t tile_panel = kDotRows * kPanel;
    const Epilogue epilogue{task, tile_panel};
    alignas(64) float tiles[kWide * kDotRows * kPanel];
    int64_t panels = 0;
    for (int64_t p = task.panel0; p < task.panel1; p += panels) {
        const uint16_t *w = (const uint16_t *)task.w->data + p * w_panel;
        if (task.m == 1 && p + kWide <= task.panel1) {  // see kWide
            panels = kWide;
            micro_dot<1, kWide>(x, 0, w, w_panel, pairs, tiles, tile_panel);
            epilogue.rows(tiles, 0, 1, p, 2);
            epilogue.rows(tiles + 2 * tile_panel, 0, 1, p + 2, 2);
            continue;
        }
        panels = imin<int64_t>(2, task.panel1 - p);
        for (int64_t i = 0; i < task.m; i += kDotRows) {
            const int64_t rows = imin<int64_t>(kDotRows, task.m - i);
            const uint16_t *from = x + i * x_stride;
            if (panels == 2) micro_dot_rows<2>(rows, from, x_stride, w, w_panel, pairs, tiles);
            else micro_dot_rows<1>(rows, from, x_stride, w, w_panel, pairs, tiles);
            epilogue.rows(tiles, i, rows, p, panels);
        }
    }
}

}  // namespace PHLOEM_NS
}  // namespace phloem
