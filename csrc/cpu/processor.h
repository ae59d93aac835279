// What this processor and its operating system allow, read from CPUID and XCR0.
#pragma once
#include <cstdint>

namespace phloem {

// Registers as the processor gives them; a test fills them in by hand.
struct CpuidLeaves {
    uint32_t max_leaf;
    uint32_t leaf1_ecx;
    uint32_t leaf7_ebx, leaf7_edx;    // leaf 7, part 0
    uint32_t leaf7_1_eax;             // leaf 7, part 1
    uint32_t tile_palettes;           // leaf 0x1d, part 0: the greatest palette
    uint32_t palette_ebx, palette_ecx;  // leaf 0x1d, part 1: row bytes and names; rows
    uint64_t xcr0;                    // 0 where the system does not use XSAVE
};

struct CpuFeatures {
    bool avx2;        // with FMA and half-floats
    bool avx512;      // F, BW, DQ, VL
    bool avx512bf16;  // and dot products of bf16
    bool amx;         // and tiles of at least 16 rows of 64 bytes, bf16 products
};

// An instruction set counts only if the system saves its registers, too.
CpuFeatures features_of(const CpuidLeaves &leaves);

// Of this machine, read once.
const CpuFeatures &cpu_features();

// Linux gives tile registers to a process that asks. Asks once; false if it refuses.
bool tiles_granted();

}  // namespace phloem
