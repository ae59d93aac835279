// y = x W^T with AMX tiles: 16 rows by 16 columns, 32 of k at a time.
//
// A bf16 panel is already a column of tiles: 16 pairs of k by 16 columns, 1 KiB, one after another;
// x comes as tiles, too (tile_at). Two shapes: rows in blocks of 32 against two panels (tiles 0-3 are
// sums, 4-5 x, 6-7 W), and up to 16 rows against four panels (0-3 sums, 4 x, 5-7 W in turn). Ragged k
// is zeros in x and W; ragged n is zeros in W. Of ragged rows the wide shape leaves out those that
// are not there; the other one multiplies whatever lies in their place, and nobody reads the sums.
#pragma once
#include "bf16.h"
#include "tiles.h"

namespace phloem {
namespace PHLOEM_NS {

constexpr int64_t kMostRows = 2 * kTileRows, kMostPanels = 4;
constexpr int64_t kAmxPrefetchBytes = 2048;
// Two panels of so much k stay in the first cache while rows pass by; then sums are kept in memory.
constexpr int64_t kChunkBlocks = 18;
constexpr int64_t kSumRows = 512;  // whose sums are kept
constexpr int64_t kLeastWritten = 2;  // rows at once, or calls take longest
constexpr int64_t kPairSums = 2 * kMostRows * kPanel;

// Tiles are configured while this lives: sums and x with `rows` rows.
class Tiles {
public:
    explicit Tiles(int64_t rows) {
        TileConfig config{};
        config.palette = 1;
        for (int t = 0; t < 8; ++t) {
            config.row_bytes[t] = kTileBytes;
            config.rows[t] = (uint8_t)(t < 5 ? rows : kTileRows);
        }
        tiles_begin(config);
    }
    ~Tiles() { tiles_end(); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
};

// Sums that are still to be written: in small parts, between the products of the next block, whose
// tiles keep one unit busy and leave all others idle.
class Pending {
public:
    Pending(const Kernels &kernels, const GemmTask &task) : kernels_(kernels), task_(task) {}
    void set(const SumRows &rows, int64_t count) {
        rows_ = rows;
        left_ = count;
        write_ = kernels_.write_sums(task_, rows_);
    }
    void some(int64_t most) {
        if (left_ == 0) return;
        const int64_t count = imin(most, left_);
        left_ -= count;
        write_(rows_, count);
    }
    void all() { some(left_); }

private:
    const Kernels &kernels_;
    const GemmTask &task_;
    SumRows rows_{};
    SumWriter write_ = nullptr;
    int64_t left_ = 0;
};

// The panels that come next, fetched into the second cache, a few lines at a time.
struct Ahead {
    const char *at, *end;

    void fetch(int64_t lines) {
        for (; lines > 0 && at < end; --lines, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

struct Pair {
    const uint16_t *x, *lower, *w, *second;  // blocks of 16 rows, panels
    float *sums;                             // panels x 32 rows x 16
    int64_t blocks;                          // of k
    bool first;                              // of the chunks of k
};

// sums [+]= x times two panels (or one).
template <int PANELS, bool LOWER>
static void amx_pair(const Pair &pair, Pending &pending, Ahead &ahead, int64_t lines) {
    const uint16_t *x = pair.x, *lower = pair.lower, *w = pair.w, *second = pair.second;
    float *const sums = pair.sums, *const right = sums + kMostRows * kPanel;
    constexpr int64_t kLower = kTileRows * kPanel;
    if (pair.first) {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
    } else {
        tile_load<0>(sums, kTileBytes);
        if (PANELS > 1) tile_load<1>(right, kTileBytes);
        if (LOWER) tile_load<2>(sums + kLower, kTileBytes);
        if (LOWER && PANELS > 1) tile_load<3>(right + kLower, kTileBytes);
    }
    const int64_t rows = imax(kLeastWritten, ceil_div(kMostRows, pair.blocks));
    for (int64_t b = 0; b < pair.blocks; ++b) {
        ahead.fetch(lines);
        tile_load<6>(w, kTileBytes);
        tile_load_once<4>(x, kTileBytes);
        tile_dot<0, 4, 6>();
        if (PANELS > 1) {
            tile_load<7>(second, kTileBytes);
            tile_dot<1, 4, 7>();
        }
        if (LOWER) {
            tile_load_once<5>(lower, kTileBytes);
            tile_dot<2, 5, 6>();
            if (PANELS > 1) tile_dot<3, 5, 7>();
        }
        pending.some(rows);
        x += kTileElements, lower += kTileElements, w += kTileElements, second += kTileElements;
    }
    pending.all();
    tile_store<0>(sums, kTileBytes);
    if (PANELS > 1) tile_store<1>(right, kTileBytes);
    if (LOWER) tile_store<2>(sums + kLower, kTileBytes);
    if (LOWER && PANELS > 1) tile_store<3>(right + kLower, kTileBytes);
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
static void amx_wide(const uint16_t *x, const uint16_t *w, int64_t w_panel, int64_t blocks,
                     float *out) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t b = 0; b < blocks; ++b, x += kTileElements, w += kTileElements) {
        tile_load<4>(x, kTileBytes);
        amx_wide_panel<0, PANELS>(w, w_panel);
        amx_wide_panel<1, PANELS>(w, w_panel);
        amx_wide_panel<2, PANELS>(w, w_panel);
        amx_wide_panel<3, PANELS>(w, w_panel);
    }
    constexpr int64_t kNext = kTileRows * kPanel;
    tile_store<0>(out, kTileBytes);
    if (PANELS > 1) tile_store<1>(out + kNext, kTileBytes);
    if (PANELS > 2) tile_store<2>(out + 2 * kNext, kTileBytes);
    if (PANELS > 3) tile_store<3>(out + 3 * kNext, kTileBytes);
}

struct AmxGemm {
    const Kernels &kernels;
    const GemmTask &task;
    const uint16_t *x;
    int64_t w_panel, blocks;

    const uint16_t *panel(int64_t p) const {
        return (const uint16_t *)task.w->data + p * w_panel;
    }
    // What is multiplied after panels p and p + 1.
    Ahead ahead(int64_t p) const {
        const char *at = (const char *)(p + 2 < task.panel1 ? panel(p + 2) : task.next);
        return {at, at ? at + 4 * w_panel : at};
    }

    // Rows row0 ... row0 + rows - 1, at most kSumRows.
    void pairs(int64_t row0, int64_t rows) const {
        alignas(64) float sums[kSumRows / kMostRows * kPairSums];
        const int64_t chunks = ceil_div(blocks, kChunkBlocks), chunk = ceil_div(blocks, chunks);
        const int64_t lines = ceil_div(4 * w_panel / 64, blocks * ceil_div(rows, kMostRows));
        const Tiles tiles(kTileRows);
        Pending pending(kernels, task);
        for (int64_t p = task.panel0; p < task.panel1; p += 2) {
            Ahead next = ahead(p);
            const int64_t panels = imin<int64_t>(2, task.panel1 - p);
            for (int64_t b = 0; b < blocks; b += chunk)
                for (int64_t i = 0; i < rows; i += kMostRows) {
                    const int64_t here = imin(kMostRows, rows - i);
                    Pair pair;
                    pair.x = x + ((row0 + i) / kTileRows * blocks + b) * kTileElements;
                    pair.lower = pair.x + blocks * kTileElements;
                    pair.w = panel(p) + b * kTileElements;
                    pair.second = pair.w + w_panel;
                    pair.sums = sums + i / kMostRows * kPairSums;
                    pair.blocks = imin(chunk, blocks - b);
                    pair.first = b == 0;
                    const bool lower = here > kTileRows;
                    if (panels == 2 && lower) amx_pair<2, true>(pair, pending, next, lines);
                    else if (panels == 2) amx_pair<2, false>(pair, pending, next, lines);
                    else if (lower) amx_pair<1, true>(pair, pending, next, lines);
                    else amx_pair<1, false>(pair, pending, next, lines);
                    if (b + chunk >= blocks)
                        pending.set(SumRows{pair.sums, kMostRows * kPanel, row0 + i, p, panels}, here);
                }
        }
        pending.all();
    }

    void write(const float *sums, int64_t p, int64_t panels) const {
        SumRows rows{sums, kTileRows * kPanel, 0, p, panels};
        kernels.write_sums(task, rows)(rows, task.m);
    }

    // At most 16 rows.
    void wide() const {
        alignas(64) float sums[kMostPanels * kTileRows * kPanel];
        const Tiles tiles(task.m);
        for (int64_t p = task.panel0; p < task.panel1; p += kMostPanels) {
            const int64_t panels = imin(kMostPanels, task.panel1 - p);
            switch (panels) {
                case 4: amx_wide<4>(x, panel(p), w_panel, blocks, sums); break;
                case 3: amx_wide<3>(x, panel(p), w_panel, blocks, sums); break;
                case 2: amx_wide<2>(x, panel(p), w_panel, blocks, sums); break;
                default: amx_wide<1>(x, panel(p), w_panel, blocks, sums); break;
            }
            constexpr int64_t kNext = kTileRows * kPanel;
            for (int64_t j = 0; j < panels; j += 2)
                write(sums + j * kNext, p + j, imin<int64_t>(2, panels - j));
        }
    }
};

static void amx_gemm(const Kernels &kernels, const GemmTask &task, const uint16_t *x, int64_t) {
    const int64_t blocks = ceil_div(task.w->k, kBf16Depth);
    const AmxGemm gemm{kernels, task, x, blocks * kTileElements, blocks};
    if (task.m <= kTileRows) return gemm.wide();
    for (int64_t row = 0; row < task.m; row += kSumRows)
        gemm.pairs(row, imin(kSumRows, task.m - row));
}

}  // namespace PHLOEM_NS
}  // namespace phloem
