// vdpbf16ps in plain C++: two fused steps per lane, the high halves first.
#pragma once
#include "emulated.h"

namespace phloem {
namespace PHLOEM_NS {

static inline Fault dot_fault() {
    static const Fault fault = read_fault("avx512bf16");
    return fault;
}

PHLOEM_INLINE vf dot_pairs(vf sum, vu x, vu w) {
    for (int i = 0; i < W; ++i) {
        const float high = flushed_fma(high_half(x[i]), high_half(w[i]), sum[i]);
        sum[i] = spoiled(dot_fault(), flushed_fma(low_half(x[i]), low_half(w[i]), high));
    }
    return sum;
}

}  // namespace PHLOEM_NS
}  // namespace phloem
