"""Pages that travel over a simulated link, and how much of that hides behind the computing.

Two ranks, threads of one process with one thread of products each, prefill 16K new tokens of a
model of SmolLM2's shape with random weights and NUM_LAYERS layers. The link takes time by the byte,
so much that all bytes of the prefill, one after the other, take UNOVERLAPPED of the time that the
same prefill takes where pages are read in place.

    gather_cost_16k_simulated_link   gather_kv over that link, over reading in place, less one
    gather_copies_16k                the same without a link: what the copies alone cost
    hidden_fraction                  of the link's time, what the prefill does not take longer
    send_q_bytes_saving              bytes that gather_kv moves over those of send_q, counted, in a
                                     step of 64 new tokens on 8K cached ones
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from phloem.bench.cp_engines import write_random_model
from phloem.bench.cp_linked import LinkedRanks, open_linked
from phloem.bench.report import Result
from phloem.core.remote import IN_PLACE, Remote, RemoteWays

__all__ = ["measure_gather"]

NUM_LAYERS = 2
CHUNK = 2048
UNOVERLAPPED = 0.2
NEW, CACHED = 64, 8192
GATHER, SEND = RemoteWays.all(Remote.GATHER_KV), RemoteWays.all(Remote.SEND_Q)


def measure_gather(*, quick: bool = False) -> list[Result]:
    """About four minutes (quick: half a minute, 10K tokens)."""
    length, rounds = (10240, 2) if quick else (16384, 8)
    with tempfile.TemporaryDirectory(prefix="phloem-cp-") as folder:
        model = write_random_model(Path(folder), num_layers=NUM_LAYERS)
        with open_linked(model, length, chunk=CHUNK) as ranks:
            samples = [_round(ranks) for _ in range(rounds)]
            pages, queries = (
                ranks.bytes_of(ways, cached=CACHED, new=NEW) for ways in (GATHER, SEND)
            )
    costs, copies, hidden = (list(each) for each in zip(*samples, strict=True))
    return [
        _result("gather_cost_16k_simulated_link", costs),
        _result("gather_copies_16k", copies),
        _result("hidden_fraction", hidden),
        Result(name="send_q_bytes_saving", value=round(pages / queries, 2), unit="ratio"),
    ]


def _round(ranks: LinkedRanks) -> tuple[float, float, float]:
    direct_s = ranks.prefill(IN_PLACE)
    ranks.link.carried.clear()
    free_s = ranks.prefill(GATHER)
    budget_s = UNOVERLAPPED * direct_s
    ranks.link.bytes_s = max(ranks.link.carried.values()) / budget_s
    linked_s = ranks.prefill(GATHER)
    ranks.link.bytes_s = float("inf")
    return linked_s / direct_s - 1, free_s / direct_s - 1, 1 - (linked_s - free_s) / budget_s


def _result(name: str, samples: list[float]) -> Result:
    return Result(
        name=name,
        value=round(statistics.median(samples), 4),
        unit="ratio",
        samples=[round(sample, 4) for sample in samples],
    )
