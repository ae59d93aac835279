// From sums to outputs: bias, gate, residual, the output's dtype.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

// Rows of one panel of outputs; of each, where the first is and how far the next one.
template <class YT, class RT> struct OutRows {
    const float *sums, *up;      // rows of 16; up: of the panel after it, with a gate
    const float *bias, *up_bias;  // or null
    YT *y;
    const RT *residual;  // or null
    int64_t y_step, residual_step, rows;

    PHLOEM_INLINE vf biased(const float *sums, const float *bias, int v) {
        const vf x = load(sums + v * W);
        return bias ? x + load(bias + v * W) : x;
    }
    template <int GATE> void write() const {
        const float *in = sums, *in_up = up;
        YT *out = y;
        const RT *add = residual;
        for (int64_t i = 0; i < rows; ++i) {
            for (int v = 0; v < NV; ++v) {
                vf x = biased(in, bias, v);
                if constexpr (GATE == PHLOEM_GATE_SILU) x = vsilu(x);
                if constexpr (GATE == PHLOEM_GATE_GELU_TANH) x = vgelu_tanh(x);
                if constexpr (GATE != PHLOEM_GATE_NONE) x *= biased(in_up, up_bias, v);
                if (add) x += load(add + v * W);
                store(out + v * W, x);
            }
            in += kPanel, in_up += kPanel, out += y_step;
            if (add) add += residual_step;
        }
    }
    // Only the first n columns exist.
    void write_ragged(int64_t n) const {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < n; ++c) {
                float x = sums[i * kPanel + c];
                if (bias) x += bias[c];
                if (residual) x += get(residual + i * residual_step + c);
                put(y + i * y_step + c, x);
            }
    }
};

struct Epilogue {
    const GemmTask &task;
    int64_t tile_panel = kMR * kPanel;  // from one panel of sums to the next

    // sums: up to 2 panels of rows of 16.
    void rows(const float *sums, int64_t row0, int64_t num_rows, int64_t panel,
              int64_t panels) const {
        for (int64_t j = 0; j < panels; j += task.gate ? 2 : 1)
            panel_rows(sums + j * tile_panel, row0, num_rows, panel + j);
    }

private:
    void panel_rows(const float *sums, int64_t row0, int64_t num_rows, int64_t panel) const {
        if (task.y_dtype == PHLOEM_F32) return residual_as<float>(sums, row0, num_rows, panel);
        if (task.y_dtype != kTiles) return residual_as<uint16_t>(sums, row0, num_rows, panel);
        while (num_rows > 0) {  // rows are evenly apart inside of a tile
            const int64_t here = imin(16 - row0 % 16, num_rows);
            residual_as<uint16_t>(sums, row0, here, panel);
            sums += here * kPanel, row0 += here, num_rows -= here;
        }
    }
    template <class YT>
    void residual_as(const float *sums, int64_t row0, int64_t num_rows, int64_t panel) const {
        if (task.residual_dtype == PHLOEM_F32) gate_as<YT, float>(sums, row0, num_rows, panel);
        else gate_as<YT, uint16_t>(sums, row0, num_rows, panel);
    }
    template <class YT, class RT>
    void gate_as(const float *sums, int64_t row0, int64_t num_rows, int64_t panel) const {
        const float *bias = task.w->bias;
        const int64_t column = (task.gate ? panel / 2 : panel) * kPanel;
        const bool tiles = task.y_dtype == kTiles;
        OutRows<YT, RT> out;
        out.sums = sums;
        out.up = sums + tile_panel;
        out.bias = bias ? bias + panel * kPanel : bias;
        out.up_bias = bias ? bias + (panel + 1) * kPanel : bias;
        out.y = (YT *)task.y + (tiles ? tile_at(row0, column, ceil_div(task.y_stride, kBf16Depth))
                                      : row0 * task.y_stride + column);
        out.y_step = tiles ? kBf16Depth : task.y_stride;
        out.residual = (const RT *)task.residual;
        if (out.residual) out.residual += row0 * task.residual_stride + column;
        out.residual_step = task.residual_stride;
        out.rows = num_rows;
        const int64_t n = task.w->n - panel * kPanel;
        if (task.gate == PHLOEM_GATE_SILU) out.template write<PHLOEM_GATE_SILU>();
        else if (task.gate) out.template write<PHLOEM_GATE_GELU_TANH>();
        else if (n >= kPanel) out.template write<PHLOEM_GATE_NONE>();
        else out.write_ragged(n);
    }
};

static void write_sums(const GemmTask &task, const SumsBlock &block) {
    Epilogue{task, block.tile_panel}.rows(block.sums, block.row0, block.rows, block.panel,
                                          block.panels);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
