// From sums to outputs: bias, gate, residual, the output's dtype.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

enum OutKind { OUT_F32, OUT_BF16, OUT_TILES };

template <int GATE> PHLOEM_INLINE vf gated(vf gate, vf up) {
    return (GATE == PHLOEM_GATE_SILU ? vsilu(gate) : vgelu_tanh(gate)) * up;
}

template <OutKind OUT> struct OutOf { typedef uint16_t Item; };
template <> struct OutOf<OUT_F32> { typedef float Item; };

// What writers need, in registers: stores to y might be to SumRows for all the compiler knows.
template <OutKind OUT, class RT> struct OutRows {
    typedef typename OutOf<OUT>::Item Y;

    const float *sums, *const bias;
    Y *y;
    const RT *residual;
    int64_t row;
    const int64_t second, y_step, residual_step, tile_step;

    explicit OutRows(const SumRows &s)
        : sums(s.sums), bias(s.bias), y((Y *)s.y), residual((const RT *)s.residual), row(s.row),
          second(s.tile_panel), y_step(s.y_step), residual_step(s.residual_step),
          tile_step(s.tile_step) {}
    __attribute__((always_inline)) void next() {
        sums += kPanel;
        y += y_step;
        if (residual) residual += residual_step;
        if (OUT == OUT_TILES && ++row % kTileRows == 0) y += tile_step;
    }
    void keep(SumRows &s) const {
        s.sums = sums;
        s.y = y;
        s.residual = residual;
        s.row = row;
    }
};

template <OutKind OUT, class RT, int GATE, int PANELS>
static void write_rows(SumRows &s, int64_t count) {
    OutRows<OUT, RT> at(s);
    for (int64_t i = 0; i < count; ++i, at.next())
        for (int v = 0; v < PANELS * NV; ++v) {
            const float *from = at.sums + v / NV * at.second + v % NV * W;
            vf x = load(from);
            if (at.bias) x += load(at.bias + v * W);
            if constexpr (GATE != PHLOEM_GATE_NONE) {
                vf up = load(from + at.second);
                if (at.bias) up += load(at.bias + kPanel + v * W);
                x = gated<GATE>(x, up);
            }
            if (at.residual) x += load(at.residual + v * W);
            store(at.y + v * W, x);
        }
    at.keep(s);
}

// Not all of the columns exist.
template <OutKind OUT, class RT> static void write_ragged(SumRows &s, int64_t count) {
    OutRows<OUT, RT> at(s);
    for (int64_t i = 0; i < count; ++i, at.next())
        for (int64_t c = 0; c < s.columns; ++c) {
            float x = at.sums[c / kPanel * at.second + c % kPanel];
            if (at.bias) x += at.bias[c];
            if (at.residual) x += get(at.residual + c);
            put(at.y + c, x);
        }
    at.keep(s);
}

template <OutKind OUT, class RT> static SumWriter writer_for(int32_t gate, const SumRows &s) {
    if (gate == PHLOEM_GATE_SILU) return write_rows<OUT, RT, PHLOEM_GATE_SILU, 1>;
    if (gate == PHLOEM_GATE_GELU_TANH) return write_rows<OUT, RT, PHLOEM_GATE_GELU_TANH, 1>;
    if (s.columns < s.panels * kPanel) return write_ragged<OUT, RT>;
    return s.panels > 1 ? write_rows<OUT, RT, PHLOEM_GATE_NONE, 2>
                        : write_rows<OUT, RT, PHLOEM_GATE_NONE, 1>;
}
template <OutKind OUT>
static SumWriter writer_for(int32_t residual_dtype, int32_t gate, const SumRows &s) {
    return residual_dtype == PHLOEM_F32 ? writer_for<OUT, float>(gate, s)
                                        : writer_for<OUT, uint16_t>(gate, s);
}

// s.sums, tile_panel, row, panel and panels say where; the rest is filled in.
static SumWriter write_sums(const GemmTask &task, SumRows &s) {
    const int64_t column = (task.gate ? s.panel / 2 : s.panel) * kPanel;
    const bool tiles = task.y_dtype == kTiles;
    s.bias = task.w->bias ? task.w->bias + s.panel * kPanel : nullptr;
    s.columns = imin(s.panels * kPanel, task.w->n - s.panel * kPanel);
    s.y_step = tiles ? kBf16Depth : task.y_stride;
    s.residual_step = task.residual_stride;
    const int64_t k_blocks = tiles ? ceil_div(task.y_stride, kBf16Depth) : 0;
    s.tile_step = (k_blocks - 1) * kTileElements;
    const int64_t at = tiles ? tile_at(s.row, column, k_blocks) : s.row * task.y_stride + column;
    s.y = (char *)task.y + at * dtype_bytes(task.y_dtype);
    s.residual = task.residual;
    if (s.residual)
        s.residual = (const char *)s.residual + (s.row * task.residual_stride + column) *
                                                    dtype_bytes(task.residual_dtype);
    if (tiles) return writer_for<OUT_TILES>(task.residual_dtype, task.gate, s);
    if (task.y_dtype == PHLOEM_F32) return writer_for<OUT_F32>(task.residual_dtype, task.gate, s);
    return writer_for<OUT_BF16>(task.residual_dtype, task.gate, s);
}

struct Epilogue {
    const GemmTask &task;
    int64_t tile_panel = kMR * kPanel;  // from one panel of sums to the next

    // sums: up to 2 panels of rows of 16.
    void rows(const float *sums, int64_t row0, int64_t num_rows, int64_t panel,
              int64_t panels) const {
        SumRows s{sums, tile_panel, row0, panel, panels};
        write_sums(task, s)(s, num_rows);
    }
};

}  // namespace PHLOEM_NS
}  // namespace phloem
