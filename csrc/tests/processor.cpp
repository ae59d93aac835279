// What features_of makes of CPUID leaves and XCR0: every bit that must count does.
#include "processor.h"

#include <cstdio>
#include <initializer_list>

namespace {

using namespace phloem;

int failures = 0;

void expect(bool ok, const char *what) {
    if (ok) return;
    printf("FAILED: %s\n", what);
    ++failures;
}

// A Sapphire Rapids as it describes itself under Linux.
CpuidLeaves sapphire_rapids() {
    CpuidLeaves l{};
    l.max_leaf = 0x20;
    l.leaf1_ecx = 1u << 27 | 1u << 28 | 1u << 29 | 1u << 12;
    l.leaf7_ebx = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    l.leaf7_edx = 1u << 22 | 1u << 24;
    l.leaf7_1_eax = 1u << 5;
    l.tile_palettes = 1;
    l.palette_ebx = 8u << 16 | 64;
    l.palette_ecx = 16;
    l.xcr0 = 0x602e7;
    return l;
}

int count(const CpuFeatures &f) { return f.avx2 + f.avx512 + f.avx512bf16 + f.amx; }

// Taking away one thing leaves `left` of the four.
template <class F> void without(const char *what, int left, const F &take) {
    CpuidLeaves l = sapphire_rapids();
    take(l);
    const CpuFeatures f = features_of(l);
    expect(count(f) == left, what);
    expect(f.amx <= f.avx512 && f.avx512bf16 <= f.avx512 && f.avx512 <= f.avx2, what);
}

}  // namespace

int main() {
    expect(count(features_of(sapphire_rapids())) == 4, "all of a Sapphire Rapids");
    expect(count(features_of(CpuidLeaves{})) == 0, "nothing of nothing");
    without("leaf 7", 0, [](CpuidLeaves &l) { l.max_leaf = 6; });
    without("saved AVX state", 0, [](CpuidLeaves &l) { l.xcr0 = 3; });
    for (int bit : {12, 28, 29})
        without("FMA, AVX, F16C", 0, [&](CpuidLeaves &l) { l.leaf1_ecx &= ~(1u << bit); });
    without("AVX2", 0, [](CpuidLeaves &l) { l.leaf7_ebx &= ~(1u << 5); });
    for (uint64_t state : {0x20, 0x40, 0x80})
        without("saved AVX-512 state", 1, [&](CpuidLeaves &l) { l.xcr0 &= ~state; });
    for (int bit : {16, 17, 30, 31})
        without("F, DQ, BW, VL", 1, [&](CpuidLeaves &l) { l.leaf7_ebx &= ~(1u << bit); });
    without("AVX512_BF16", 3, [](CpuidLeaves &l) { l.leaf7_1_eax = 0; });
    for (uint64_t state : {0x20000, 0x40000})
        without("saved tiles", 3, [&](CpuidLeaves &l) { l.xcr0 &= ~state; });
    for (int bit : {22, 24})
        without("AMX-BF16, AMX-TILE", 3, [&](CpuidLeaves &l) { l.leaf7_edx &= ~(1u << bit); });
    without("a palette", 3, [](CpuidLeaves &l) { l.tile_palettes = 0; });
    without("rows of 64 bytes", 3, [](CpuidLeaves &l) { l.palette_ebx = 8u << 16 | 32; });
    without("8 tiles", 3, [](CpuidLeaves &l) { l.palette_ebx = 4u << 16 | 64; });
    without("16 rows", 3, [](CpuidLeaves &l) { l.palette_ecx = 8; });
    const CpuFeatures &here = cpu_features();
    expect(here.amx <= here.avx512 && here.avx512 <= here.avx2, "this machine");
    expect(tiles_granted() == tiles_granted(), "asked once");
    if (!here.amx) expect(!tiles_granted(), "no tiles are granted where there are none");
    printf("avx2 %d, avx512 %d, avx512bf16 %d, amx %d, tiles granted %d\n", here.avx2, here.avx512,
           here.avx512bf16, here.amx, tiles_granted());
    printf(failures ? "%d failures\n" : "all right\n", failures);
    return failures != 0;
}
