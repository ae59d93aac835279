"""Weight structs: plain tensors with names. Functions over them live in the decoder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["DecoderWeights", "LayerWeights", "Linear"]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """`weight` (out, in), contiguous; `bias` (out,) or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer. `qkv` stacks the rows of q, k and v; `gate_up` those of gate and up.

    Weights of norms may be fp32 in a model of a narrower dtype. `post_attn_norm` and
    `post_mlp_norm`: of what is added to the residual. `sinks` (H,): each head's score of no token.

    Latent attention (`config/mla.py`): `qkv` stacks q or its latent on the latent and the rotary
    key, `q_norm` and `k_norm` are of the latents, `q_up` (H * head_dim, q_rank) and `kv_up`
    (H * (nope_dim + v_dim), kv_rank) make heads of them.
    """

    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_attn_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    sinks: Tensor | None = None
    q_up: Linear | None = None
    kv_up: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All that it has."""
        linears = (self.qkv, self.q_up, self.kv_up, self.out, self.gate_up, self.down)
        return tuple(linear for linear in linears if linear is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecoderWeights:
    """A decoder. A tied `head` is the tensor of `embedding`, (vocab, hidden), or rows of it."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; what is shared counts once."""
        tensors = [self.embedding, self.norm]
        if self.head.untyped_storage().data_ptr() != self.embedding.untyped_storage().data_ptr():
            tensors.append(self.head)
        for layer in self.layers:
            tensors += [lin.weight for lin in layer.linears]
            optional = [lin.bias for lin in layer.linears] + [layer.q_norm, layer.k_norm]
            optional += [layer.post_attn_norm, layer.post_mlp_norm, layer.sinks]
            tensors += [t for t in optional if t is not None]
            tensors += [layer.attn_norm, layer.mlp_norm]
        return sum(t.numel() * t.element_size() for t in tensors)
