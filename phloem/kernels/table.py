"""The op table: what a backend must compute. Every implementation is tested against `reference`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from phloem.kernels.buffer import KVBuffer

__all__ = ["Ops", "Scoring"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the product s of a query and a key becomes a score: s * scale, then, with a softcap c,
    c * tanh(s / c)."""

    scale: float
    softcap: float | None = None


class Ops(Protocol):
    """Letters: N tokens, H heads, K KV heads, D head dim; B batch, L queries, S keys; J sides of
    pages (K and V: 2; rows that are both: 1)."""

    name: str

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x (N, in) times weight (out, in) transposed, plus bias (out,): (N, out) in x's dtype."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension by its root mean square, then scale by `weight`.

        In fp32, rounded once to x's dtype; `weight` may be of a wider dtype than x.
        """
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate halves of x (N, H, D) by angles (N, D / 2). May overwrite and return x."""
        ...

    def heads_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head its own matrix: x (N, H, in) times weight (H, out, in), any strides."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension. May overwrite its argument."""
        ...

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        """As `silu_mul`, with GELU by its tanh approximation."""
        ...

    def write_kv(self, buffer: KVBuffer, layer: int, k: Tensor, v: Tensor, index: Tensor) -> None:
        """Store k, v (N, K, D) in the token rows `index` of `KVBuffer.token_index`.

        Pages of one side hold k alone: v is a part of it.
        """
        ...

    def gather_kv(self, buffer: KVBuffer, layer: int, index: Tensor) -> Tensor:
        """Read pages: `index` (J, G, *R) of `KVBuffer.object_index` -> (J, K, prod(R) * T, D).

        The result is a fresh contiguous tensor: the caller may overwrite it.
        """
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scoring: Scoring,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention: q (B, H, L, D), k and v (B, H, S, D) -> (B, H, L, D), LSE (B, H, L).
        v may have another D; then so has the result.

        The LSE is the natural log of the sum of exponentials of the scores, fp32. `causal`: query i
        sees keys 0 ... i (then L == S). `mask`: additive, zeros and -inf, broadcast over
        (B, 1, L, S); no query sees nothing. Not both.
        """
        ...
