// Eight tiles per thread in plain C++, with every check of the hardware that would be a fault, and
// one more: tiles that are configured must be released before they are configured again.
#pragma once
#include "emulated.h"

namespace phloem {
namespace PHLOEM_NS {

struct EmulatedTiles {
    bool configured;
    TileConfig config;
    uint32_t data[8][kTileRows][kTileBytes / 4];
};

static inline EmulatedTiles &emulated() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}

static inline Fault tile_fault() {
    static const Fault fault = read_fault("amx");
    return fault;
}

static inline void emulated_begin(const TileConfig &config) {
    EmulatedTiles &e = emulated();
    if (e.configured) refuse("tiles were not released");
    if (config.palette != 1 || config.start_row) refuse("palette or start row");
    for (int i = 0; i < 14; ++i)
        if (config.reserved[i]) refuse("reserved bytes");
    for (int t = 0; t < 16; ++t) {
        const bool used = config.rows[t] || config.row_bytes[t];
        if (used && (t >= 8 || !config.rows[t] || config.rows[t] > kTileRows ||
                     !config.row_bytes[t] || config.row_bytes[t] > kTileBytes))
            refuse("rows or bytes of a tile");
    }
    memset(&e, 0, sizeof e);
    e.config = config;
    e.configured = true;
}

static inline void emulated_end() {
    if (!emulated().configured) refuse("released twice");
    memset(&emulated(), 0, sizeof(EmulatedTiles));
}

static inline void check_tile(int t) {
    if (!emulated().configured || !emulated().config.rows[t]) refuse("a tile without a shape");
}

static inline void emulated_zero(int t) {
    check_tile(t);
    memset(emulated().data[t], 0, sizeof emulated().data[t]);
}

static inline void emulated_load(int t, const void *base, int64_t stride_bytes) {
    check_tile(t);
    EmulatedTiles &e = emulated();
    memset(e.data[t], 0, sizeof e.data[t]);
    for (int r = 0; r < e.config.rows[t]; ++r)
        memcpy(e.data[t][r], (const char *)base + r * stride_bytes, e.config.row_bytes[t]);
}

static inline void emulated_store(int t, void *base, int64_t stride_bytes) {
    check_tile(t);
    const EmulatedTiles &e = emulated();
    for (int r = 0; r < e.config.rows[t]; ++r)
        memcpy((char *)base + r * stride_bytes, e.data[t][r], e.config.row_bytes[t]);
}

// One row: low and high products each in a chain of their own over k, then both, then the sum.
static inline void emulated_dot_row(const uint32_t *x, const uint32_t (*b)[kTileBytes / 4],
                                    int pairs, int columns, uint32_t *c) {
    for (int n = 0; n < columns; ++n) {
        float low = 0.0f, high = 0.0f, sum;
        for (int k = 0; k < pairs; ++k) {
            low = flushed_fma(low_half(x[k]), low_half(b[k][n]), low);
            high = flushed_fma(high_half(x[k]), high_half(b[k][n]), high);
        }
        memcpy(&sum, &c[n], 4);
        sum = spoiled(tile_fault(), flushed(flushed(sum) + flushed(low + high)));
        memcpy(&c[n], &sum, 4);
    }
}

// Tile c += rows of tile x times pairs of rows of tile b.
static inline void emulated_dot(int c, int x, int b) {
    if (c == x || c == b || x == b) refuse("a product needs three tiles");
    check_tile(c);
    check_tile(x);
    check_tile(b);
    EmulatedTiles &e = emulated();
    const int pairs = e.config.row_bytes[x] / 4, columns = e.config.row_bytes[c] / 4;
    if (e.config.rows[c] != e.config.rows[x] || e.config.row_bytes[c] != e.config.row_bytes[b] ||
        pairs != e.config.rows[b] || e.config.row_bytes[x] % 4 || e.config.row_bytes[c] % 4)
        refuse("tiles do not fit each other");
    for (int m = 0; m < e.config.rows[c]; ++m)
        emulated_dot_row(e.data[x][m], e.data[b], pairs, columns, e.data[c][m]);
}

// What cpu/tiles.h has as instructions.
static inline void tiles_begin(const TileConfig &config) { emulated_begin(config); }
static inline void tiles_end() { emulated_end(); }
template <int T> static inline void tile_zero() { emulated_zero(T); }
template <int T> static inline void tile_load(const void *base, int64_t stride_bytes) {
    emulated_load(T, base, stride_bytes);
}
template <int T> static inline void tile_load_once(const void *base, int64_t stride_bytes) {
    emulated_load(T, base, stride_bytes);
}
template <int T> static inline void tile_store(void *base, int64_t stride_bytes) {
    emulated_store(T, base, stride_bytes);
}
template <int C, int X, int B> static inline void tile_dot() { emulated_dot(C, X, B); }

}  // namespace PHLOEM_NS
}  // namespace phloem
