// AMX tile instructions, as asm statements of our own.
//
// gcc 12's _tile_loadconfig names 8 bytes of the 64 as its input, so stores to the others may be
// dropped, and its _tile_loadd may be moved before the stores that fill what it reads. Here the
// configuration is an operand as a whole, and loads and stores of tiles are memory barriers to the
// compiler. It needs no -mamx flags, only an assembler that knows the names.
//
// PHLOEM_EMULATE: the same functions in plain C++, for tests.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace phloem {
namespace PHLOEM_NS {

constexpr int kTileBytes = 64;  // of a row; there are kTileRows of them

// What ldtilecfg reads, palette 1.
struct alignas(64) TileConfig {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "ldtilecfg reads 64 bytes");

}  // namespace PHLOEM_NS
}  // namespace phloem

#if defined(PHLOEM_EMULATE)
#include "emulated_tiles.h"
#else
namespace phloem {
namespace PHLOEM_NS {

PHLOEM_INLINE void tiles_begin(const TileConfig &config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
PHLOEM_INLINE void tiles_end() { __asm__ volatile("tilerelease"); }
template <int T> PHLOEM_INLINE void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> PHLOEM_INLINE void tile_load(const void *base, int64_t stride_bytes) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride_bytes), "i"(T)
                     : "memory");
}
// The same of what is read once: it pushes less out of the first cache.
template <int T> PHLOEM_INLINE void tile_load_once(const void *base, int64_t stride_bytes) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride_bytes), "i"(T)
                     : "memory");
}
template <int T> PHLOEM_INLINE void tile_store(void *base, int64_t stride_bytes) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride_bytes), "i"(T)
                     : "memory");
}
// Tile C += rows of tile X times pairs of rows of tile B.
template <int C, int X, int B> PHLOEM_INLINE void tile_dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(X), "i"(B));
}

}  // namespace PHLOEM_NS
}  // namespace phloem
#endif
