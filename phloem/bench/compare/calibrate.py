"""Which precision a peer is faster in on this machine: measured once, and remembered.

A CPU without bf16 instructions multiplies bf16 far slower than fp32. A peer is then measured at
its better precision, although ours stays bf16: the comparison must not win by a bad setting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phloem.bench.client import Client
from phloem.bench.compare.peer import Peer, PeerUnavailable, Say, ServerSpec
from phloem.bench.compare.process import running
from phloem.bench.compare.tasks import Decode, Prefill, Probe, Task
from phloem.bench.local_server import free_port
from phloem.bench.report import machine_info

__all__ = ["Precision", "best_precision"]

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Precision:
    """The choice, and the rates of `_rates` that led to it, by precision."""

    dtype: str
    rates: Mapping[str, Sequence[float]]
    failures: Sequence[str] = ()


async def best_precision(
    peer: Peer, version: str, spec: ServerSpec, cache: Path, say: Say
) -> Precision:
    """The precision with the better geometric mean of a short prefill and decode.

    Kept beside the peer's environment, for this version and processor.
    Raises PeerUnavailable if it starts in none.
    """
    if len(peer.dtypes) == 1:
        return Precision(peer.dtypes[0], {})
    file = cache / f"{peer.name}-precision.json"
    key = [version, machine_info()["cpu"], spec.model.label, spec.threads]
    known = _read(file)
    if known.get("key") != key:
        rates: dict[str, list[float]] = {}
        failures = []
        for dtype in peer.dtypes:
            say(f"{peer.name}: trying {dtype}")
            try:
                rates[dtype] = await _rates(peer, replace(spec, dtype=dtype))
            except PeerUnavailable as error:
                failures.append(f"{dtype}: {error}")
        if not rates:
            raise PeerUnavailable("; ".join(failures))
        known = {"key": key, "rates": rates, "failures": failures}
        file.write_text(json.dumps(known))
    found: dict[str, list[float]] = known["rates"]
    best = max(found, key=lambda dtype: math.prod(found[dtype]))
    return Precision(best, found, known["failures"])


async def _rates(peer: Peer, spec: ServerSpec) -> list[float]:
    # Short contexts: where bf16 is slow, it is slow enough to notice soon.
    decodes = [Decode(batch, context=64, num_tokens=32) for batch in (1, 8)]
    tasks: list[Task] = [Prefill(512), *decodes]
    port = free_port()
    with running(peer.launch(spec, port), port) as process:
        async with Client(process.url) as client:
            probe = Probe(client, await client.first_model(), seed="precision")
            out = []
            for task in tasks:
                await task.prime(probe)
                out.append(max([await task.sample(probe, n) for n in range(_ROUNDS)]))
            return out


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found
