// y = x W^T over packed panels of 16 output columns.
//
//   panel p, f32:    [k][16 columns]
//   panel p, bf16:   [k / 2][16 columns][2]   (k even, k odd side by side in 32 bits, so that
//                    a shift and a mask widen both; also the order of VNNI and AMX tiles;
//                    k is padded with zeros to a multiple of 32, whole tiles)
//
// Every output is one chain of multiply-adds in the order of k, whatever m is: a row's result does
// not depend on the rows beside it (batch-invariant), to the last bit.
#pragma once
#include "epilogue.inl"
#include "kernels.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

// Vector v of row k (odd or even) of the pair of rows at p: 32 elements.
template <int ODD> PHLOEM_INLINE vf panel_row(const float *p, int v) {
    return load(p + ODD * kPanel + v * W);
}
template <int ODD> PHLOEM_INLINE vf panel_row(const uint16_t *p, int v) {
    vu u;
    memcpy(&u, p + 2 * v * W, sizeof u);
    return ODD ? (vf)(u & 0xffff0000u) : (vf)(u << 16);
}

constexpr int64_t kPrefetchBytes = 1024;

enum ASide { ROWS, COLUMNS };  // a[i * stride + k], or a[k * stride + i]

template <class WT, int MR, int NP, ASide A, int ODD>
PHLOEM_INLINE void step(const float *a, int64_t a_stride, const WT *b, int64_t b_panel, int64_t k,
                        vf (&acc)[MR][NP * NV]) {
    const auto left = [&](int i) {
        return set1(A == ROWS ? a[i * a_stride + k] : a[k * a_stride + i]);
    };
    const auto right = [&](int j) { return panel_row<ODD>(b + (j / NV) * b_panel, j % NV); };
    if constexpr (MR <= 2) {  // keep what is fewer in registers
        vf x[MR];
        for (int i = 0; i < MR; ++i) x[i] = left(i);
#pragma GCC unroll 16
        for (int j = 0; j < NP * NV; ++j) {
            vf bv = right(j);
            for (int i = 0; i < MR; ++i) acc[i][j] = fma(x[i], bv, acc[i][j]);
        }
    } else {
        vf bv[NP * NV];
#pragma GCC unroll 8
        for (int j = 0; j < NP * NV; ++j) bv[j] = right(j);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            vf x = left(i);
#pragma GCC unroll 8
            for (int j = 0; j < NP * NV; ++j) acc[i][j] = fma(x, bv[j], acc[i][j]);
        }
    }
}

// c (MR, NP panels of 16; rows c_stride, panels c_panel apart) = [c +] a (MR, k) b (k, 16 NP).
template <class WT, int MR, int NP, ASide A, bool ADD>
static void micro(const float *a, int64_t a_stride, const WT *b, int64_t b_panel, int64_t k,
                  float *c, int64_t c_stride, int64_t c_panel) {
    vf acc[MR][NP * NV];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NP * NV; ++j) {
            const float *at = c + i * c_stride + (j / NV) * c_panel + (j % NV) * W;
            acc[i][j] = ADD ? load(at) : vf{};
        }
    int64_t kk = 0;
    for (; kk + 2 <= k; kk += 2) {
        // Panels are read front to back; the hardware's own prefetch starts too late for DRAM.
#pragma GCC unroll 4
        for (int j = 0; j < NP; ++j)
            __builtin_prefetch((const char *)(b + j * b_panel) + kPrefetchBytes);
        step<WT, MR, NP, A, 0>(a, a_stride, b, b_panel, kk, acc);
        step<WT, MR, NP, A, 1>(a, a_stride, b, b_panel, kk + 1, acc);
        b += 2 * kPanel;
    }
    if (kk < k) step<WT, MR, NP, A, 0>(a, a_stride, b, b_panel, kk, acc);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < NP * NV; ++j)
            store(c + i * c_stride + (j / NV) * c_panel + (j % NV) * W, acc[i][j]);
}

// micro for a number of rows known only at run time, 1 <= rows <= kMR.
template <class WT, int NP, ASide A, bool ADD, int MR = kMR>
PHLOEM_INLINE void micro_rows(int64_t rows, const float *a, int64_t a_stride, const WT *b,
                              int64_t b_panel, int64_t k, float *c, int64_t c_stride,
                              int64_t c_panel) {
    if constexpr (MR > 1) {
        if (rows < MR) {
            micro_rows<WT, NP, A, ADD, MR - 1>(rows, a, a_stride, b, b_panel, k, c, c_stride,
                                               c_panel);
            return;
        }
    }
    micro<WT, MR, NP, A, ADD>(a, a_stride, b, b_panel, k, c, c_stride, c_panel);
}

// One row has few independent sums in a panel: four panels at a time hide the adders' latency.
constexpr int kWide = 4;

template <class WT> static void gemm_panels(const GemmTask &task) {
    const int64_t k = task.w->k, tile_panel = kMR * kPanel;
    const int64_t b_panel = panel_bytes(task.w->format, k) / (int64_t)sizeof(WT);
    const Epilogue epilogue{task};
    alignas(64) float tiles[kWide * kMR * kPanel];
    int64_t panels = 0;
    for (int64_t p = task.panel0; p < task.panel1; p += panels) {
        const WT *b = (const WT *)task.w->data + p * b_panel;
        if (task.m == 1 && p + kWide <= task.panel1) {
            panels = kWide;
            micro<WT, 1, kWide, ROWS, false>(task.x, 0, b, b_panel, k, tiles, kPanel, tile_panel);
            epilogue.rows(tiles, 0, 1, p, 2);
            epilogue.rows(tiles + 2 * tile_panel, 0, 1, p + 2, 2);
            continue;
        }
        panels = imin<int64_t>(2, task.panel1 - p);
        for (int64_t i = 0; i < task.m; i += kMR) {
            const int64_t rows = imin<int64_t>(kMR, task.m - i);
            const float *x = task.x + i * task.x_stride;
            if (panels == 2 && rows <= 2) {
                micro_rows<WT, 2, ROWS, false, 2>(rows, x, task.x_stride, b, b_panel, k, tiles,
                                                  kPanel, tile_panel);
            } else if (kNP == 2 && panels == 2) {
                micro_rows<WT, 2, ROWS, false>(rows, x, task.x_stride, b, b_panel, k, tiles,
                                               kPanel, tile_panel);
            } else {
                for (int64_t j = 0; j < panels; ++j)
                    micro_rows<WT, 1, ROWS, false>(rows, x, task.x_stride, b + j * b_panel,
                                                   b_panel, k, tiles + j * tile_panel, kPanel,
                                                   tile_panel);
            }
            epilogue.rows(tiles, i, rows, p, panels);
        }
    }
}

static void gemm(const GemmTask &task) {
    if (task.w->format == PHLOEM_W_F32) gemm_panels<float>(task);
    else gemm_panels<uint16_t>(task);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
