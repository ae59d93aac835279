"""Which tensors of a checkpoint make up which part of a decoder: names and shapes, no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phloem.config.mla import MLAConfig
from phloem.config.model import ModelConfig
from phloem.models.family import WeightNames
from phloem.models.shard import WHOLE, Shard
from phloem.models.source import ALL, Part

__all__ = ["DecoderPieces", "LayerPieces", "LinearPieces", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, of `shape` in the file, and which `part` of it is read.

    `interleaved_heads`: the part is so many heads whose halves alternate by rows; 0: it is not.
    `interleaved_rows`: of each of those heads only the last so many rows; 0: all. `offset` is to be
    added to it.
    """

    name: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    offset: float = 0.0
    interleaved_rows: int = 0
    part: Part = ALL


@dataclass(frozen=True, slots=True)
class LinearPieces:
    """A matrix whose rows come from several tensors, one below the other; so does its bias."""

    weight: tuple[Piece, ...]
    bias: tuple[Piece, ...] = ()

    def all(self) -> Iterator[Piece]:
        yield from self.weight
        yield from self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPieces:
    """One decoder layer. `gate_up` has two tensors of equal shape."""

    attn_norm: Piece
    qkv: LinearPieces
    q_norm: Piece | None
    k_norm: Piece | None
    out: LinearPieces
    mlp_norm: Piece
    gate_up: LinearPieces
    down: LinearPieces
    post_attn_norm: Piece | None
    post_mlp_norm: Piece | None
    sinks: Piece | None
    q_up: LinearPieces | None = None
    kv_up: LinearPieces | None = None

    def all(self) -> Iterator[Piece]:
        linears = (self.qkv, self.q_up, self.kv_up, self.out, self.gate_up, self.down)
        for linear in linears:
            yield from () if linear is None else linear.all()
        yield from (self.attn_norm, self.mlp_norm)
        norms = (self.q_norm, self.k_norm, self.post_attn_norm, self.post_mlp_norm)
        yield from (piece for piece in (*norms, self.sinks) if piece is not None)


class DecoderPieces:
    """The tensors of a model, spelt as `names`, and what of each a shard of the model takes.

    `interleaved`: the rows of q and k are. `norm_offset` is to be added to the weights of norms.

    A shard takes rows of what makes heads (q, k, v), of gate and up, and of the output head; the
    columns of `out` and `down` that these rows feed; and all of the rest. What `out` and `down`
    give is then a summand, to which a bias is added once.
    """

    def __init__(
        self,
        config: ModelConfig,
        names: WeightNames,
        *,
        interleaved: bool,
        norm_offset: float = 0.0,
        shard: Shard = WHOLE,
    ) -> None:
        self._config, self._names, self._interleaved = config, names, interleaved
        self._norm_offset, self._shard = norm_offset, shard
        table = (config.vocab_size, config.hidden_size)
        self.embedding = LinearPieces((_weight(names.embedding, table),))
        self.norm = self._norm(names.norm, config.hidden_size)
        self.head = None
        if not config.tie_embeddings:
            head = _weight(names.head, table)
            self.head = LinearPieces((self._rows(head) if shard.divides_head(config) else head,))

    def all(self) -> Iterator[Piece]:
        """Every tensor that is needed, in no special order."""
        yield from self.embedding.all()
        yield self.norm
        if self.head is not None:
            yield from self.head.all()
        for i in range(self._config.num_layers):
            yield from self.layer(i).all()

    def layer(self, i: int) -> LayerPieces:
        c, n = self._config, self._names
        hidden, inter = c.hidden_size, c.intermediate_size
        out, sinks = n.out.format(i=i), n.sinks.format(i=i)

        def norm(name: str, size: int = hidden) -> Piece:
            return self._norm(name.format(i=i), size)

        attention = self._latent(i, c.mla) if c.mla is not None else self._heads(i)
        return LayerPieces(
            **attention,
            attn_norm=norm(n.attn_norm),
            out=LinearPieces(
                (self._columns(_weight(out, (hidden, c.out_size))),),
                (Piece(f"{out}.bias", (hidden,)),) if c.out_bias else (),
            ),
            mlp_norm=norm(n.mlp_norm),
            gate_up=LinearPieces(
                tuple(
                    self._rows(_weight(name.format(i=i), (inter, hidden)))
                    for name in (n.gate, n.up)
                )
            ),
            down=LinearPieces((self._columns(_weight(n.down.format(i=i), (hidden, inter))),)),
            post_attn_norm=norm(n.post_attn_norm) if c.post_norms else None,
            post_mlp_norm=norm(n.post_mlp_norm) if c.post_norms else None,
            sinks=self._rows(Piece(sinks, (c.num_heads,))) if c.sinks else None,
        )

    def _rows(self, piece: Piece) -> Piece:
        """The shard's rows of it, whole heads where it makes heads."""
        if self._shard.count == 1:
            return piece
        heads = piece.interleaved_heads // self._shard.count
        part = Part(rows=self._shard.span(piece.shape[0]))
        return replace(piece, part=part, interleaved_heads=heads)

    def _columns(self, piece: Piece) -> Piece:
        """The shard's columns of it."""
        if self._shard.count == 1:
            return piece
        return replace(piece, part=Part(columns=self._shard.span(piece.shape[1])))

    def _norm(self, module: str, size: int) -> Piece:
        return Piece(f"{module}.weight", (size,), offset=self._norm_offset)

    def _heads(self, i: int) -> dict[str, Any]:
        """q, k and v of each head, and their norms."""
        c, n = self._config, self._names

        def norm(name: str) -> Piece | None:
            return self._norm(name.format(i=i), c.head_dim) if c.qk_norm else None

        return {"qkv": self._qkv(i), "q_norm": norm(n.q_norm), "k_norm": norm(n.k_norm)}

    def _latent(self, i: int, mla: MLAConfig) -> dict[str, Any]:
        """What latent attention computes from the hidden state, and what makes heads of it."""
        c, n = self._config, self._names
        q_rank, at = mla.q_rank, n.latent.format(i=i)
        heads, turned = (c.num_heads, mla.rope_dim) if mla.rope_interleaved else (0, 0)
        q = self._rows(Piece(f"{at}.q_proj.weight", (c.q_size, c.hidden_size), heads, 0.0, turned))
        q_up = None
        if q_rank is not None:
            shape = (c.q_size, q_rank)
            up = Piece(f"{at}.q_b_proj.weight", shape, heads, 0.0, turned)
            q_up = LinearPieces((self._rows(up),))
            q = _weight(f"{at}.q_a_proj", (q_rank, c.hidden_size))
        shape = (mla.row_dim, c.hidden_size)
        kv = Piece(f"{at}.kv_a_proj_with_mqa.weight", shape, min(1, heads), 0.0, turned)
        kv_up = self._rows(_weight(f"{at}.kv_b_proj", (c.num_heads * mla.up_dim, mla.kv_rank)))
        return {
            "qkv": LinearPieces((q, kv)),
            "q_norm": None if q_rank is None else self._norm(f"{at}.q_a_layernorm", q_rank),
            "k_norm": self._norm(f"{at}.kv_a_layernorm", mla.kv_rank),
            "q_up": q_up,
            "kv_up": LinearPieces((kv_up,)),
        }

    def _qkv(self, i: int) -> LinearPieces:
        c, n = self._config, self._names
        modules = [name.format(i=i) for name in (n.q, n.k, n.v)]
        sizes = (c.q_size, c.kv_size, c.kv_size)
        heads = (c.num_heads, c.num_kv_heads, 0) if self._interleaved else (0, 0, 0)
        rows = list(zip(modules, sizes, heads, strict=True))
        return LinearPieces(
            tuple(
                self._rows(Piece(f"{m}.weight", (size, c.hidden_size), h)) for m, size, h in rows
            ),
            tuple(self._rows(Piece(f"{m}.bias", (size,), h)) for m, size, h in rows)
            if c.qkv_bias
            else (),
        )


def _weight(module: str, shape: tuple[int, ...]) -> Piece:
    return Piece(f"{module}.weight", shape)
