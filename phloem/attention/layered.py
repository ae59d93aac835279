"""Attention of a whole model: each layer has its component, and its place within it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch

__all__ = ["LayeredAttention"]


class LayeredAttention:
    """Joins the backends of a model's components.

    `layers[c]`: the model's numbers of the layers of component c, in the order of its pages.
    `exchanges`: whether `attend` needs other ranks.
    """

    exchanges = False

    def __init__(
        self, backends: Sequence[AttentionBackend[Any]], layers: Sequence[Sequence[int]]
    ) -> None:
        self._backends, self._layers = tuple(backends), tuple(map(tuple, layers))
        self._places = {
            layer: (component, index)
            for component, numbers in enumerate(self._layers)
            for index, layer in enumerate(numbers)
        }

    @property
    def backends(self) -> tuple[AttentionBackend[Any], ...]:
        return self._backends

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        return self._layers

    @property
    def num_layers(self) -> int:
        return len(self._places)

    def place(self, layer: int) -> tuple[int, int]:
        """The component of one of the model's layers, and its number there."""
        return self._places[layer]

    def writes(self, meta: Sequence[Any]) -> Sequence[Any]:
        """By component, what `AttentionBackend.write` writes by."""
        return meta

    def serve(self, layer: int, q: Tensor, meta: Sequence[Any]) -> None:
        """Take part in a layer without a token: nobody needs anything."""

    def plan(self, batches: Sequence[RaggedBatch]) -> tuple[Any, ...]:
        """A plan per component, of its view of the batch; None where it has no layers."""
        parts = zip(self._backends, self._layers, batches, strict=True)
        return tuple(backend.plan(batch) if layers else None for backend, layers, batch in parts)

    def attend(
        self, layer: int, q: Tensor, meta: Sequence[Any], *, sinks: Tensor | None = None
    ) -> Tensor:
        """As `AttentionBackend.attend`; `layer` counts within the model."""
        component, index = self._places[layer]
        return self._backends[component].attend(index, q, meta[component], sinks=sinks)

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Sequence[Any],
        *,
        sinks: Tensor | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `AttentionBackend.run`; `layer` counts within the model.

        `on_written` is called with it when K and V are in their pages, before any are read.
        """
        component, index = self._places[layer]
        backend, plan = self._backends[component], meta[component]
        backend.write(index, k, v, plan)
        if on_written is not None:
            on_written(layer)
        return backend.attend(index, q, plan, sinks=sinks)
