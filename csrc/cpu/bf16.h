// Products of bf16 activations with bf16 panels, where the processor multiplies bf16.
//
// Activations are rounded to bf16 once, padded with zeros to a multiple of kBf16Depth; sums are fp32. An output is one chain of the same instructions whatever m is, so a row's result does
// not depend on the rows beside it. It depends on the instruction set: tiles add the products of a
// block of 32 before they add it to the sum, dot products add pair after pair.
#pragma once
#include "kernels.h"

namespace phloem {

struct Bf16Kernels {
    // A row of k elements becomes bf16, the rest of a multiple of kBf16Depth zeros; null: x is to be
    // in tiles, see Kernels::round_tiles.
    void (*round)(const void *x, int32_t dtype, int64_t k, uint16_t *out);
    // task.x is not used: tiles at x, or rows of bf16, x_stride elements apart, padded as `round`
    // pads them. `kernels` has the rest of what the processor can do.
    void (*gemm)(const Kernels &kernels, const GemmTask &task, const uint16_t *x,
                 int64_t x_stride);
    int32_t rows_per_tile;
    double flops_per_us;  // roughly, of a core: chooses the size of tasks
};

extern const Bf16Kernels kBf16Amx;
extern const Bf16Kernels kBf16Avx512;

}  // namespace phloem
