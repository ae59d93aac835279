// From sums to outputs: bias, gate, residual, the output's dtype.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

struct Epilogue {
    const GemmTask &task;
    int64_t tile_panel = kMR * kPanel;  // from one panel of sums to the next

    // Columns that the panel has of the n that exist.
    int64_t width(int64_t panel) const {
        return imin<int64_t>(kPanel, task.w->n - panel * kPanel);
    }
    PHLOEM_INLINE vf sum(const float *sums, const float *bias, int v) {
        const vf x = load(sums + v * W);
        return bias ? x + load(bias + v * W) : x;
    }
    const float *bias(int64_t panel) const {
        return task.w->bias ? task.w->bias + panel * kPanel : nullptr;
    }
    template <class YT> YT *out(int64_t row, int64_t column) const {
        if (task.y_dtype == kTiles)
            return (YT *)task.y + tile_at(row, column, ceil_div(task.y_stride, kBf16Depth));
        return (YT *)task.y + row * task.y_stride + column;
    }
    // f(residual at this place), or f(null)
    template <class F> PHLOEM_INLINE void with_residual(const GemmTask &task, int64_t row,
                                                        int64_t column, const F &f) {
        const int64_t at = row * task.residual_stride + column;
        if (!task.residual) f((const float *)nullptr);
        else if (task.residual_dtype == PHLOEM_F32) f((const float *)task.residual + at);
        else f((const uint16_t *)task.residual + at);
    }
    template <class YT>
    void gated(const float *sums, int64_t row, int64_t panel) const {
        const float *gate_bias = bias(panel), *up_bias = bias(panel + 1);
        YT *y = out<YT>(row, panel / 2 * kPanel);
        with_residual(task, row, panel / 2 * kPanel, [&](auto *residual) {
            for (int v = 0; v < NV; ++v) {
                const vf gate = sum(sums, gate_bias, v);
                vf x = task.gate == PHLOEM_GATE_SILU ? vsilu(gate) : vgelu_tanh(gate);
                x *= sum(sums + tile_panel, up_bias, v);
                if (residual) x += load(residual + v * W);
                store(y + v * W, x);
            }
        });
    }
    template <class YT> void plain(const float *sums, int64_t row, int64_t panel) const {
        const float *add = bias(panel);
        YT *y = out<YT>(row, panel * kPanel);
        const int64_t n = width(panel);
        with_residual(task, row, panel * kPanel, [&](auto *residual) {
            if (n == kPanel) {
                for (int v = 0; v < NV; ++v) {
                    vf x = sum(sums, add, v);
                    if (residual) x += load(residual + v * W);
                    store(y + v * W, x);
                }
                return;
            }
            for (int64_t c = 0; c < n; ++c) {
                const float x = add ? sums[c] + add[c] : sums[c];
                put(y + c, residual ? x + get(residual + c) : x);
            }
        });
    }
    template <class YT>
    void rows_as(const float *sums, int64_t row0, int64_t num_rows, int64_t panel,
                 int64_t panels) const {
        for (int64_t row = row0; row < row0 + num_rows; ++row, sums += kPanel) {
            if (task.gate) {
                gated<YT>(sums, row, panel);
                continue;
            }
            plain<YT>(sums, row, panel);
            if (panels > 1) plain<YT>(sums + tile_panel, row, panel + 1);
        }
    }
    // sums: up to 2 panels of rows of 16.
    void rows(const float *sums, int64_t row0, int64_t num_rows, int64_t panel,
              int64_t panels) const {
        if (task.y_dtype == PHLOEM_F32) rows_as<float>(sums, row0, num_rows, panel, panels);
        else rows_as<uint16_t>(sums, row0, num_rows, panel, panels);
    }
};

static void write_sums(const GemmTask &task, const SumsBlock &block) {
    Epilogue{task, block.tile_panel}.rows(block.sums, block.row0, block.rows, block.panel,
                                          block.panels);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
