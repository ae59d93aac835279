#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace phloem {
namespace {

constexpr uint64_t kXcr0Avx = 0x6;      // SSE and AVX
constexpr uint64_t kXcr0Avx512 = 0xe6;  // and masks and both halves of the 512-bit registers
constexpr uint64_t kXcr0Tiles = 0x60000;

bool has(uint32_t word, int bit) { return word >> bit & 1; }
bool saves(uint64_t xcr0, uint64_t state) { return (xcr0 & state) == state; }

#if defined(__x86_64__)
CpuidLeaves read_leaves() {
    CpuidLeaves leaves{};
    uint32_t a, b, c, d;
    leaves.max_leaf = __get_cpuid_max(0, nullptr);
    if (leaves.max_leaf < 7) return leaves;
    __cpuid(1, a, b, c, d);
    leaves.leaf1_ecx = c;
    __cpuid_count(7, 0, a, b, c, d);
    leaves.leaf7_ebx = b;
    leaves.leaf7_edx = d;
    if (a >= 1) {
        __cpuid_count(7, 1, a, b, c, d);
        leaves.leaf7_1_eax = a;
    }
    if (leaves.max_leaf >= 0x1d) {
        __cpuid_count(0x1d, 0, a, b, c, d);
        leaves.tile_palettes = a;
        __cpuid_count(0x1d, 1, a, b, c, d);
        leaves.palette_ebx = b;
        leaves.palette_ecx = c;
    }
    if (has(leaves.leaf1_ecx, 27)) {  // OSXSAVE: xgetbv may be executed
        uint32_t low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        leaves.xcr0 = (uint64_t)high << 32 | low;
    }
    return leaves;
}
#else
CpuidLeaves read_leaves() { return {}; }
#endif

bool ask_for_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace

CpuFeatures features_of(const CpuidLeaves &l) {
    CpuFeatures f{};
    if (l.max_leaf < 7) return f;
    f.avx2 = saves(l.xcr0, kXcr0Avx) && has(l.leaf1_ecx, 12) && has(l.leaf1_ecx, 28) &&
             has(l.leaf1_ecx, 29) && has(l.leaf7_ebx, 5);
    f.avx512 = f.avx2 && saves(l.xcr0, kXcr0Avx512) && has(l.leaf7_ebx, 16) &&
               has(l.leaf7_ebx, 17) && has(l.leaf7_ebx, 30) && has(l.leaf7_ebx, 31);
    f.avx512bf16 = f.avx512 && has(l.leaf7_1_eax, 5);
    const uint32_t row_bytes = l.palette_ebx & 0xffff, names = l.palette_ebx >> 16;
    f.amx = f.avx512 && saves(l.xcr0, kXcr0Tiles) && has(l.leaf7_edx, 22) &&
            has(l.leaf7_edx, 24) && l.tile_palettes >= 1 && row_bytes >= 64 && names >= 8 &&
            (l.palette_ecx & 0xffff) >= 16;
    return f;
}

const CpuFeatures &cpu_features() {
    static const CpuFeatures features = features_of(read_leaves());
    return features;
}

bool tiles_granted() {
    static const bool granted = ask_for_tiles();
    return granted;
}

}  // namespace phloem
