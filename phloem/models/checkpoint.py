"""An open checkpoint: checked, read piece by piece, progress reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor

from phloem.config.checkpoint import CheckpointKind, checkpoint_kind
from phloem.config.model import ModelConfig
from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.quantised import BlockMatrix
from phloem.models.family import family_of
from phloem.models.gguf_source import GGUFSource
from phloem.models.pieces import DecoderPieces, Piece
from phloem.models.safetensors_source import SafetensorsSource
from phloem.models.shard import WHOLE, Shard
from phloem.models.source import WeightSource

__all__ = ["Checkpoint", "OnBytes"]

OnBytes: TypeAlias = Callable[[int, int], None]


class Checkpoint:
    """The tensors of the model at `path`; use as a context manager.

    `config`: of the whole model, of which `shard` is read. `on_progress(done, total)` counts bytes
    of the file. Raises ConfigError for a checkpoint that lacks a tensor (when opened), has one of a
    wrong shape, or is cut short (when read).
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        on_progress: OnBytes | None = None,
        *,
        shard: Shard = WHOLE,
    ) -> None:
        kind, family = checkpoint_kind(path), family_of(config.architecture)
        is_gguf = kind is CheckpointKind.GGUF
        self._path, self._on_progress = path, on_progress
        self._source: WeightSource = GGUFSource(path) if is_gguf else SafetensorsSource(path)
        self.pieces = DecoderPieces(
            config,
            family.gguf if is_gguf else family.hf,
            interleaved=is_gguf and family.gguf_interleaves_qk,
            norm_offset=0.0 if is_gguf else family.hf_norm_offset,
            shard=shard,
        )
        try:
            names = [piece.name for piece in self.pieces.all()]
            self._done, self._total = 0, sum(self._source.num_bytes(name) for name in names)
        except ConfigError:
            self._source.close()
            raise
        self._advance(0)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._source.close()

    def is_quantised(self, piece: Piece) -> bool:
        return self._source.is_quantised(piece.name)

    def block_format(self, piece: Piece) -> WeightFormat | None:
        """The format of its blocks, if they are ones that kernels read as they are."""
        return self._source.block_format(piece.name)

    def vector(self, piece: Piece, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.stack((piece,), dtype, device)

    def norm(self, piece: Piece, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The weight of a norm: in `dtype`, or in fp32 if something has to be added to it."""
        if piece.offset == 0.0:
            return self.vector(piece, dtype, device)
        return self.vector(piece, torch.float32, device) + piece.offset

    def stack(self, pieces: tuple[Piece, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One contiguous tensor: the pieces one below the other, halves of heads in order."""
        shapes = [piece.part.shape(piece.shape) for piece in pieces]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=device)
        low = 0
        for piece, shape in zip(pieces, shapes, strict=True):
            part = out[low : low + shape[0]]
            self._check_shape(piece)
            self._source.copy_to(piece.name, part, piece.part)
            if piece.interleaved_heads:
                part.copy_(_split_halves(part, piece))
            low += shape[0]
            self._advance(self._source.num_bytes(piece.name))
        return out

    def blocks(self, piece: Piece) -> BlockMatrix:
        """The blocks of a matrix as they are in the file, halves of heads in order."""
        self._check_shape(piece)
        blocks = self._source.blocks(piece.name, piece.part)
        self._advance(self._source.num_bytes(piece.name))
        if piece.interleaved_heads:
            return blocks.rows(_split_halves(blocks.raw, piece))
        return blocks

    def _check_shape(self, piece: Piece) -> None:
        found = self._source.shape(piece.name)
        if found != piece.shape:
            raise ConfigError(
                f"{self._path}: {piece.name} has shape {found}, the config wants {piece.shape}"
            )

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


def _split_halves(rows: Tensor, piece: Piece) -> Tensor:
    """Undo interleaving: (heads, D / 2, 2, ...) back to (heads, 2, D / 2, ...), of D rows of each
    head, before which others may stand."""
    by_head = rows.view(piece.interleaved_heads, -1, *rows.shape[1:])
    size = piece.interleaved_rows or by_head.shape[1]
    kept, turned = by_head[:, : by_head.shape[1] - size], by_head[:, by_head.shape[1] - size :]
    pairs = turned.reshape(len(by_head), size // 2, 2, *rows.shape[1:]).transpose(1, 2)
    return torch.cat((kept, pairs.reshape(turned.shape)), dim=1).view(rows.shape)
