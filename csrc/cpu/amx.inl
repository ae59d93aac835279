// y = x W^T with AMX tiles: 16 rows by 16 columns, 32 of k at a time.
//
// A bf16 panel is already a column of tiles: 16 pairs of k by 16 columns, 1 KiB, one after another.
// Two shapes: rows in blocks of 32 against two panels (tiles 0-3 are sums, 4-5 x, 6-7 W), and up to
// 16 rows against four panels (0-3 sums, 4 x, 5-7 W in turn). Ragged rows are rows that the
// configuration leaves out; ragged k is zeros in x and W; ragged n is zeros in W.
#pragma once
#include "bf16.h"
#include "gemm.inl"
#include "tiles.h"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kTileElements = kTileRows * kTileBytes / 2;  // of bf16
constexpr int64_t kMostRows = 2 * kTileRows, kMostPanels = 4;
constexpr int64_t kAmxPrefetchBytes = 2048;

// Tiles are configured while this lives. Sums and x have `first` rows; those of the second block of
// rows (the wide shape has none) `second`.
class Tiles {
public:
    Tiles(int64_t first, int64_t second) {
        TileConfig config{};
        config.palette = 1;
        for (int t = 0; t < 8; ++t) config.row_bytes[t] = kTileBytes;
        const bool wide = second == 0;
        for (int t = 0; t < 4; ++t) config.rows[t] = (uint8_t)(wide || t < 2 ? first : second);
        config.rows[4] = (uint8_t)first;
        config.rows[5] = (uint8_t)(wide ? kTileRows : second);
        config.rows[6] = config.rows[7] = kTileRows;
        tiles_begin(config);
    }
    ~Tiles() { tiles_end(); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
};

// out: panels x 32 rows x 16 sums.
template <int PANELS>
static void amx_two_rows(const uint16_t *x, int64_t x_stride, const uint16_t *w, int64_t w_panel,
                         int64_t blocks, float *out) {
    const int64_t x_bytes = 2 * x_stride;
    const uint16_t *lower = x + kTileRows * x_stride;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t b = 0; b < blocks; ++b, x += kBf16Depth, lower += kBf16Depth, w += kTileElements) {
        tile_load<6>(w, kTileBytes);
        tile_load<4>(x, x_bytes);
        tile_dot<0, 4, 6>();
        if (PANELS > 1) {
            tile_load<7>(w + w_panel, kTileBytes);
            tile_dot<1, 4, 7>();
        }
        tile_load<5>(lower, x_bytes);
        tile_dot<2, 5, 6>();
        if (PANELS > 1) tile_dot<3, 5, 7>();
    }
    tile_store<0>(out, kTileBytes);
    tile_store<2>(out + kTileRows * kPanel, kTileBytes);
    if (PANELS > 1) {
        tile_store<1>(out + kMostRows * kPanel, kTileBytes);
        tile_store<3>(out + (kMostRows + kTileRows) * kPanel, kTileBytes);
    }
}

// The tile of x times panel J; tiles 5, 6, 7 hold panels in turn.
template <int J, int PANELS>
PHLOEM_INLINE void amx_wide_panel(const uint16_t *w, int64_t w_panel) {
    if constexpr (J < PANELS) {
        constexpr int kTile = 5 + J % 3;
        const uint16_t *at = w + J * w_panel;
        // Panels are read front to back; the hardware's own prefetch starts too late for DRAM.
        for (int64_t i = 0; i < 2 * kTileElements; i += 64)
            __builtin_prefetch((const char *)at + kAmxPrefetchBytes + i);
        tile_load<kTile>(at, kTileBytes);
        tile_dot<J, 4, kTile>();
    }
}

template <int PANELS>
static void amx_wide(const uint16_t *x, int64_t x_stride, const uint16_t *w, int64_t w_panel,
                     int64_t blocks, float *out) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t b = 0; b < blocks; ++b, x += kBf16Depth, w += kTileElements) {
        tile_load<4>(x, 2 * x_stride);
        amx_wide_panel<0, PANELS>(w, w_panel);
        amx_wide_panel<1, PANELS>(w, w_panel);
        amx_wide_panel<2, PANELS>(w, w_panel);
        amx_wide_panel<3, PANELS>(w, w_panel);
    }
    constexpr int64_t kNext = kMostRows * kPanel;
    tile_store<0>(out, kTileBytes);
    if (PANELS > 1) tile_store<1>(out + kNext, kTileBytes);
    if (PANELS > 2) tile_store<2>(out + 2 * kNext, kTileBytes);
    if (PANELS > 3) tile_store<3>(out + 3 * kNext, kTileBytes);
}

struct AmxGemm {
    const GemmTask &task;
    const uint16_t *x;
    int64_t x_stride, w_panel, blocks;
    float *sums;  // kMostPanels x kMostRows x 16

    const uint16_t *panel(int64_t p) const {
        return (const uint16_t *)task.w->data + p * w_panel;
    }
    Epilogue epilogue() const { return {task, kMostRows * kPanel}; }

    // Rows row0 ... row0 + rows - 1 in blocks of `block`: more than 16 rows, all full or one alone.
    void two_rows(int64_t row0, int64_t rows, int64_t block) const {
        const Tiles tiles(kTileRows, block - kTileRows);
        for (int64_t p = task.panel0; p < task.panel1; p += 2) {
            const int64_t panels = imin<int64_t>(2, task.panel1 - p);
            for (int64_t i = row0; i < row0 + rows; i += block) {
                const uint16_t *from = x + i * x_stride;
                if (panels == 2) amx_two_rows<2>(from, x_stride, panel(p), w_panel, blocks, sums);
                else amx_two_rows<1>(from, x_stride, panel(p), w_panel, blocks, sums);
                epilogue().rows(sums, i, block, p, panels);
            }
        }
    }

    // At most 16 rows.
    void wide(int64_t row0, int64_t rows) const {
        const Tiles tiles(rows, 0);
        const uint16_t *from = x + row0 * x_stride;
        for (int64_t p = task.panel0; p < task.panel1; p += kMostPanels) {
            const int64_t panels = imin(kMostPanels, task.panel1 - p);
            switch (panels) {
                case 4: amx_wide<4>(from, x_stride, panel(p), w_panel, blocks, sums); break;
                case 3: amx_wide<3>(from, x_stride, panel(p), w_panel, blocks, sums); break;
                case 2: amx_wide<2>(from, x_stride, panel(p), w_panel, blocks, sums); break;
                default: amx_wide<1>(from, x_stride, panel(p), w_panel, blocks, sums); break;
            }
            for (int64_t j = 0; j < panels; j += 2)
                epilogue().rows(sums + j * kMostRows * kPanel, row0, rows, p + j,
                                imin<int64_t>(2, panels - j));
        }
    }
};

static void amx_gemm(const GemmTask &task, const uint16_t *x, int64_t x_stride) {
    alignas(64) float sums[kMostPanels * kMostRows * kPanel];
    const int64_t blocks = ceil_div(task.w->k, kBf16Depth);
    const AmxGemm gemm{task, x, x_stride, blocks * kTileElements, blocks, sums};
    const int64_t full = task.m / kMostRows * kMostRows, rest = task.m - full;
    if (full > 0) gemm.two_rows(0, full, kMostRows);
    if (rest > kTileRows) gemm.two_rows(full, rest, rest);
    else if (rest > 0) gemm.wide(full, rest);
}

}  // namespace PHLOEM_NS
}  // namespace phloem
