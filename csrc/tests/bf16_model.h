// One output of a bf16 product in the exact order of the instructions, as Intel documents it: what
// the kernels over emulated instructions must equal bit for bit.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace model {

inline float widened(uint16_t h) {
    const uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
inline uint16_t rounded(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline float no_denormal(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
inline float fused(uint16_t a, uint16_t b, float c) {
    return no_denormal(
        std::fma(no_denormal(widened(a)), no_denormal(widened(b)), no_denormal(c)));
}

using Row = std::vector<uint16_t>;

// tdpbf16ps: per 32 of k a chain of the even and one of the odd products, their sum, then the sum.
inline float tiles(const Row &x, const Row &w) {
    float sum = 0;
    for (size_t block = 0; block < x.size(); block += 32) {
        float chain[2] = {0, 0};
        for (size_t k = block; k < std::min(block + 32, x.size()); ++k)
            chain[k % 2] = fused(x[k], w[k], chain[k % 2]);
        sum = no_denormal(sum + no_denormal(chain[0] + chain[1]));
    }
    return sum;
}

// vdpbf16ps: pair after pair, the odd product first.
inline float dots(const Row &x, const Row &w) {
    float sum = 0;
    for (size_t k = 0; k < x.size(); k += 2) {
        if (k + 1 < x.size()) sum = fused(x[k + 1], w[k + 1], sum);
        else sum = no_denormal(sum);
        sum = fused(x[k], w[k], sum);
    }
    return sum;
}

}  // namespace model
