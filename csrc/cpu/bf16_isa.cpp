// Compiled once per way to multiply bf16, each time with its own flags, namespace and
// PHLOEM_BF16_TABLE; PHLOEM_AMX: tiles, else dot products.
//
// The tile unit is compiled for AVX2, although every processor with tiles has AVX-512: so all of
// its machine code but the tile instructions runs on the machines it is tested on
// (csrc/tests/trap.cpp). What there is to do outside the tiles, Kernels do.
#if defined(PHLOEM_AMX)
#include "amx.inl"
#else
#include "dot.inl"

namespace phloem {
namespace PHLOEM_NS {

static void round_row(const void *x, int32_t dtype, int64_t k, uint16_t *out) {
    const int64_t padded = ceil_div(k, kBf16Depth) * kBf16Depth;
    int64_t i = 0;
    if (dtype == PHLOEM_BF16) {
        memcpy(out, x, 2 * k);
        i = k;
    } else {
        const float *from = (const float *)x;
        for (; i + W <= k; i += W) store(out + i, load(from + i));
        for (; i < k; ++i) put(out + i, from[i]);
    }
    for (; i < padded; ++i) out[i] = 0;
}

}  // namespace PHLOEM_NS
}  // namespace phloem
#endif

namespace phloem {
extern const Bf16Kernels PHLOEM_BF16_TABLE;
const Bf16Kernels PHLOEM_BF16_TABLE = {
#if defined(PHLOEM_AMX)
    nullptr,
    PHLOEM_NS::amx_gemm,
    PHLOEM_NS::kMostRows,
    2.5e6,
#else
    PHLOEM_NS::round_row,
    PHLOEM_NS::dot_gemm,
    PHLOEM_NS::kDotRows,
    1.5e5,
#endif
};
}  // namespace phloem
