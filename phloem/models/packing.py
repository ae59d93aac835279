"""Checkpoint -> packed weights of the native kernels, one matrix in flight at a time.

What `--quantization` makes of a matrix (rows of merged matrices must agree, else the next line):

                            none     int8               q4
    floats                  dtype    int8               dtype
    Q4_0, Q4_1              dtype    int8               the file's blocks
    Q8_0                    dtype    the file's blocks  the file's blocks
    other blocks, mixed    dtype    int8               int8 per row
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phloem.config.mla import MLAConfig
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.native_pack import (
    pack,
    pack_blocks,
    pack_gate_up,
    pack_gate_up_blocks,
    pack_up,
)
from phloem.kernels.native_types import PackedUp, PackedWeight
from phloem.kernels.quantised import BLOCK_WEIGHTS, BlockMatrix
from phloem.models.checkpoint import Checkpoint, OnBytes
from phloem.models.pieces import LinearPieces, Piece
from phloem.models.quantisation import Quantisation
from phloem.models.shard import WHOLE, Shard

__all__ = ["PackedDecoder", "PackedLayer", "load_packed"]

CPU = torch.device("cpu")


_KEPT: dict[Quantisation, set[WeightFormat | None]] = {
    Quantisation.NONE: set(),
    Quantisation.INT8: {WeightFormat.Q8_0},
    Quantisation.Q4: {WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0},
}
_FOUR_BITS = {WeightFormat.Q4_0, WeightFormat.Q4_1}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayer:
    """One decoder layer. Norms and sinks are fp32; `gate_up` alternates panels of both."""

    attn_norm: Tensor
    qkv: PackedWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PackedWeight
    mlp_norm: Tensor
    gate_up: PackedWeight
    down: PackedWeight
    post_attn_norm: Tensor | None
    post_mlp_norm: Tensor | None
    sinks: Tensor | None
    q_up: PackedWeight | None = None
    kv_up: PackedUp | None = None

    @property
    def num_bytes(self) -> int:
        norms = (self.attn_norm, self.mlp_norm, self.q_norm, self.k_norm)
        plain = (*norms, self.post_attn_norm, self.post_mlp_norm, self.sinks)
        packed = (self.qkv, self.out, self.gate_up, self.down, self.q_up, self.kv_up)
        tensors = sum(t.nbytes for t in plain if t is not None)
        return tensors + sum(w.num_bytes for w in packed if w is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedDecoder:
    """A decoder; a tied head is the embedding, or a view of it. `dtype`: of the residual stream."""

    dtype: torch.dtype
    embedding: PackedWeight
    layers: tuple[PackedLayer, ...]
    norm: Tensor  # fp32
    head: PackedWeight

    @property
    def num_bytes(self) -> int:
        """Bytes of everything; what is shared counts once."""
        layers = sum(layer.num_bytes for layer in self.layers)
        storages = {x.data.untyped_storage().data_ptr() for x in (self.head, self.embedding)}
        head = 0 if len(storages) == 1 else self.head.num_bytes
        return self.embedding.num_bytes + layers + self.norm.nbytes + head


def load_packed(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    quantisation: Quantisation = Quantisation.NONE,
    shard: Shard = WHOLE,
    on_progress: OnBytes | None = None,
) -> PackedDecoder:
    """Read a shard of the checkpoint at `path`, whose model is `config`, into what native kernels
    multiply with.

    Raises ConfigError as `Checkpoint` does, for q4 where there are no blocks of 4 bits, and where
    the shard's border lies within a block.
    """
    with Checkpoint(path, config, on_progress, shard=shard) as checkpoint:
        packer = _Packer(checkpoint, dtype, quantisation, config.mla)
        if quantisation is Quantisation.Q4:
            _need_q4(checkpoint, path)
        pieces = checkpoint.pieces
        embedding = head = packer.linear(pieces.embedding)
        if pieces.head is not None:
            head = packer.linear(pieces.head)
        elif shard.divides_head(config):
            head = embedding.columns(*shard.span(config.vocab_size))
        return PackedDecoder(
            dtype=dtype,
            embedding=embedding,
            layers=tuple(packer.layer(i) for i in range(config.num_layers)),
            norm=packer.norm(pieces.norm),
            head=head,
        )


def _need_q4(checkpoint: Checkpoint, path: Path) -> None:
    found = {checkpoint.block_format(piece) for piece in checkpoint.pieces.all()}
    if not found & _FOUR_BITS:
        raise ConfigError(
            f"--quantization q4 takes the Q4_0 or Q4_1 blocks of a GGUF file as they are, and "
            f"{path} has none; use --quantization int8 or none"
        )


class _Packer:
    """Turns pieces of one checkpoint into packed weights."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        quantisation: Quantisation,
        mla: MLAConfig | None,
    ) -> None:
        self._checkpoint, self._dtype, self._quantisation = checkpoint, dtype, quantisation
        self._mla = mla

    def norm(self, piece: Piece) -> Tensor:
        """Rounded as every computation of this model takes it."""
        return self._checkpoint.norm(piece, self._dtype, CPU).float()

    def _maybe_norm(self, piece: Piece | None) -> Tensor | None:
        return None if piece is None else self.norm(piece)

    def layer(self, i: int) -> PackedLayer:
        layer = self._checkpoint.pieces.layer(i)
        return PackedLayer(
            attn_norm=self.norm(layer.attn_norm),
            qkv=self.linear(layer.qkv),
            q_norm=self._maybe_norm(layer.q_norm),
            k_norm=self._maybe_norm(layer.k_norm),
            out=self.linear(layer.out),
            mlp_norm=self.norm(layer.mlp_norm),
            gate_up=self._gate_up(layer.gate_up),
            down=self.linear(layer.down),
            post_attn_norm=self._maybe_norm(layer.post_attn_norm),
            post_mlp_norm=self._maybe_norm(layer.post_mlp_norm),
            sinks=self._sinks(layer.sinks),
            q_up=None if layer.q_up is None else self.linear(layer.q_up),
            kv_up=None if layer.kv_up is None else self._kv_up(layer.kv_up),
        )

    def _kv_up(self, pieces: LinearPieces) -> PackedUp:
        """Never quantised: it is small, and read by head."""
        assert self._mla is not None, "only a model of latents has it"
        weight = self._checkpoint.stack(pieces.weight, self._dtype, CPU)
        by_head = weight.view(-1, self._mla.up_dim, self._mla.kv_rank)
        return pack_up(by_head, self._mla.nope_dim)

    def _sinks(self, piece: Piece | None) -> Tensor | None:
        return None if piece is None else self._checkpoint.vector(piece, self._dtype, CPU).float()

    def linear(self, pieces: LinearPieces) -> PackedWeight:
        bias = self._checkpoint.stack(pieces.bias, self._dtype, CPU) if pieces.bias else None
        if self._takes_blocks(pieces):
            parts = [self._checkpoint.blocks(piece) for piece in pieces.weight]
            return pack_blocks(BlockMatrix.stack(parts), bias)
        weight = self._checkpoint.stack(pieces.weight, self._dtype, CPU)
        return pack(weight, bias, format=self._format(pieces))

    def _gate_up(self, pieces: LinearPieces) -> PackedWeight:
        if self._takes_blocks(pieces):
            blocks = [self._checkpoint.blocks(piece) for piece in pieces.weight]
            return pack_gate_up_blocks(blocks[0], blocks[1])
        gate, up = self._checkpoint.stack(pieces.weight, self._dtype, CPU).chunk(2)
        return pack_gate_up(gate, up, format=self._format(pieces))

    def _takes_blocks(self, pieces: LinearPieces) -> bool:
        """Whether the matrix is blocks that this quantisation keeps; only one format stacks."""
        found = {self._checkpoint.block_format(piece) for piece in pieces.weight}
        return len(found) == 1 and found <= _KEPT[self._quantisation]

    def _format(self, pieces: LinearPieces) -> WeightFormat | None:
        """For a matrix that is read as floats; None keeps its dtype."""
        if self._quantisation is Quantisation.NONE:
            return None
        quantised = all(self._checkpoint.is_quantised(piece) for piece in pieces.weight)
        if not quantised and self._quantisation is not Quantisation.INT8:
            return None
        for piece in pieces.weight:
            if any(column % BLOCK_WEIGHTS for column in piece.part.columns or ()):
                raise ConfigError(
                    f"--quantization {self._quantisation.value} has a scale for {BLOCK_WEIGHTS} "
                    f"weights, and with this --tp a rank's part of {piece.name} would cut such a "
                    "block; use another --tp, or --quantization none"
                )
        return WeightFormat.Q8_0
