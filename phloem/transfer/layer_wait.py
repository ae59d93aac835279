"""How a step waits for layers that are being loaded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

__all__ = ["wait_for_layer"]

# So long; then something is broken, and failing is better than hanging.
LAYER_PATIENCE_S = 120.0


def wait_for_layer(
    changed: threading.Condition,
    has_layer: Callable[[int, int], bool],
    transfer_ids: tuple[int, ...],
    layer: int,
) -> None:
    """Return when `has_layer(transfer_id, layer)`, called under `changed`, is true of all.

    Raises RuntimeError if one does not arrive.
    """
    for transfer_id in transfer_ids:
        with changed:
            here = functools.partial(has_layer, transfer_id, layer)
            if not changed.wait_for(here, LAYER_PATIENCE_S):
                raise RuntimeError(
                    f"layer {layer} of load {transfer_id} did not arrive within "
                    f"{LAYER_PATIENCE_S:g} s"
                )
