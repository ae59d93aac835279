// Attention of prefill chunks with AMX tiles, for pages of bf16.
#pragma once
#include "kernels.h"

namespace phloem {

struct AmxAttention {
    // Whether rows of such pages can be multiplied with tiles.
    bool (*fits)(const AttentionCall &call);
    // In the place of those of `Kernels`.
    int64_t (*scratch_floats)(int64_t tokens, int64_t group, const phloem_kv_layer &kv);
    void (*tile)(const AttentionCall &call, const TileItem &item, float *o, float *ml,
                 float *scratch);
    int64_t block;  // tokens; parts of a context are whole blocks
};

extern const AmxAttention kAmxAttention;

}  // namespace phloem
