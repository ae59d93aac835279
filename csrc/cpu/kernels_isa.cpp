// Compiled once per instruction set, each time with its own flags and PHLOEM_TABLE.
#include "attention_tile.inl"
#include "blocks.inl"
#include "decode.inl"
#include "gemm.inl"
#include "latent.inl"
#include "pointwise.inl"
#include "round_tiles.inl"

namespace phloem {
extern const Kernels PHLOEM_TABLE;
const Kernels PHLOEM_TABLE = {
    PHLOEM_NS::to_f32,
    PHLOEM_NS::gemm,
    PHLOEM_NS::gemm_blocks,
    PHLOEM_NS::quantize_x,
    PHLOEM_NS::round_tiles,
    PHLOEM_NS::write_sums,
    PHLOEM_NS::rmsnorm,
    PHLOEM_NS::rmsnorm_add,
    PHLOEM_NS::silu_mul,
    PHLOEM_NS::embedding,
    PHLOEM_NS::rope,
    PHLOEM_NS::latent,
    PHLOEM_NS::tile_scratch_floats,
    PHLOEM_NS::attention_tile,
    PHLOEM_NS::decode_scratch_floats,
    PHLOEM_NS::attention_decode,
    PHLOEM_NS::attention_merge,
    PHLOEM_NS::argmax,
    PHLOEM_NS::top_k,
    PHLOEM_NS::W,
    PHLOEM_NS::kMR,
};
}  // namespace phloem
