// Rows of pages that are codes with scales, as phloem/kernels/codec.py lays them out: to the bit.
//
//   int8, fp8    | n codes | scale (bf16) |                      of each part of a row
//   fp4          | n / 2 bytes, two codes each | n / 16 scales |
#pragma once
#include "phloem_cpu.h"

namespace phloem {

constexpr int64_t kMostRowNumbers = 1024;  // of packed rows and latents: for a moment on the stack
constexpr int64_t kFp4Block = 16;

static inline bool is_packed(int32_t dtype) { return dtype >= PHLOEM_KV_INT8; }
// Items of a pool (numbers, or bytes if they are packed) of n numbers that lie together.
static inline int64_t part_items(int32_t dtype, int64_t n) {
    if (dtype == PHLOEM_KV_FP4) return n / 2 + n / kFp4Block;
    return is_packed(dtype) ? n + 2 : n;
}
static inline int64_t value_dim(const phloem_kv_layer &kv) {
    return kv.value_dim ? kv.value_dim : kv.head_dim;
}
// Numbers of the first part of a row of K.
static inline int64_t lead_dim(const phloem_kv_layer &kv) { return kv.head_dim - kv.tail_dim; }
// Items of a row of K.
static inline int64_t row_items(const phloem_kv_layer &kv) {
    return part_items(kv.dtype, lead_dim(kv)) + part_items(kv.dtype, kv.tail_dim) *
                                                    (kv.tail_dim > 0);
}
// Whether values are a part of the rows of K.
static inline bool is_latent(const phloem_kv_layer &kv) { return kv.kv_stride == 0; }

}  // namespace phloem
