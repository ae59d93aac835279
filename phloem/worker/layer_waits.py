"""One step's waits: layer n is computed when layer n of every load that the step reads is here."""

from __future__ import annotations

import time
from collections.abc import Callable

from phloem.core.transfer import LayerGate

__all__ = ["LayerWaits"]


class LayerWaits:
    """Counts the layers of one forward pass and waits before each; free where nothing is loaded."""

    def __init__(
        self, gate: LayerGate | None, loads: tuple[int, ...], on_layer: Callable[[], None]
    ) -> None:
        assert gate is not None or not loads, "a plan reads loads, but the worker has no transfers"
        self._gate = gate if loads else None
        self._loads = loads
        self._on_layer = on_layer
        self._layer = 0
        self.waited_s = 0.0

    def wait(self) -> None:
        """Before a layer."""
        if self._gate is not None:
            started = time.perf_counter()
            self._gate.wait_layer(self._loads, self._layer)
            self.waited_s += time.perf_counter() - started

    def layer_done(self) -> None:
        """After a layer, and so before the next one. After the last it returns at once."""
        self._on_layer()
        self._layer += 1
        self.wait()
