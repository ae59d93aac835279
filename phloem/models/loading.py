"""Checkpoint -> DecoderWeights: plain tensors of one dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from phloem.config.model import ModelConfig
from phloem.layers import DecoderWeights, LayerWeights, Linear
from phloem.models.checkpoint import Checkpoint, OnBytes
from phloem.models.pieces import LinearPieces, Piece
from phloem.models.shard import WHOLE, Shard

__all__ = ["load_weights"]


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    on_progress: OnBytes | None = None,
) -> DecoderWeights:
    """Read a shard of the checkpoint at `path`, whose model is `config`, into `dtype` on `device`.

    Raises ConfigError as `Checkpoint` does.
    """
    with Checkpoint(path, config, on_progress, shard=shard) as checkpoint:
        pieces = checkpoint.pieces
        embedding = checkpoint.stack(pieces.embedding.weight, dtype, device)
        layers = tuple(_layer(checkpoint, i, dtype, device) for i in range(config.num_layers))
        head = embedding
        if pieces.head is not None:
            head = checkpoint.stack(pieces.head.weight, dtype, device)
        elif shard.divides_head(config):
            head = embedding[slice(*shard.span(config.vocab_size))]
        norm = checkpoint.norm(pieces.norm, dtype, device)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def _layer(
    checkpoint: Checkpoint, i: int, dtype: torch.dtype, device: torch.device
) -> LayerWeights:
    """Layer `i` of an open checkpoint."""
    layer = checkpoint.pieces.layer(i)

    def linear(pieces: LinearPieces) -> Linear:
        bias = checkpoint.stack(pieces.bias, dtype, device) if pieces.bias else None
        return Linear(checkpoint.stack(pieces.weight, dtype, device), bias)

    def norm(piece: Piece | None) -> Tensor | None:
        return None if piece is None else checkpoint.norm(piece, dtype, device)

    return LayerWeights(
        attn_norm=checkpoint.norm(layer.attn_norm, dtype, device),
        qkv=linear(layer.qkv),
        q_norm=norm(layer.q_norm),
        k_norm=norm(layer.k_norm),
        out=linear(layer.out),
        mlp_norm=checkpoint.norm(layer.mlp_norm, dtype, device),
        gate_up=linear(layer.gate_up),
        down=linear(layer.down),
        post_attn_norm=norm(layer.post_attn_norm),
        post_mlp_norm=norm(layer.post_mlp_norm),
        sinks=checkpoint.vector(layer.sinks, dtype, device) if layer.sinks else None,
        q_up=linear(layer.q_up) if layer.q_up else None,
        kv_up=linear(layer.kv_up) if layer.kv_up else None,
    )
