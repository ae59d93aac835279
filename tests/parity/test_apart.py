"""Ranks that share no memory, as on several hosts: tokens and logits of the cold one rank.

Ranks are threads with pools and token buffers of their own. Freed pages are NaN.
"""

from __future__ import annotations

import random

import pytest

from phloem.core.remote import Remote, RemoteWays
from phloem.kv.sizing import least_window_pages
from phloem.worker import SampledTokens
from tests.parity.come_and_go import come_and_go
from tests.parity.conftest import Models, Windowed
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words
from tests.parity.test_tiers import chat

CELLS = [
    ("llama", 2, "send_q", True, "auto"),
    ("llama", 4, "gather_kv", False, "torch"),
    ("v3", 2, "gather_kv", True, "torch"),
    ("v3-yarn", 3, "send_q", True, "torch"),
]


@pytest.mark.parametrize(("kind", "ranks", "way", "overlap", "kernels"), CELLS, ids=str)
def test_requests_that_come_and_go_over_a_small_pool(
    models: Models, kind: str, ranks: int, way: str, overlap: bool, kernels: str
) -> None:
    """A request's next token is often sampled by another rank than the one that computes it."""
    path, rng = models(kind), random.Random(f"{kind} {ranks}")
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        max_prefill_tokens=20,
        max_running=4,
        ranks=ranks,
        overlap=overlap,
        kernels=kernels,
        remote=RemoteWays.all(Remote(way)),
        apart=True,
    ) as rig:
        come_and_go(rig, rng, 12)
        check_all(rig, Cold(path))


@pytest.mark.parametrize(
    ("family", "ranks", "way"), [("gemma3", 2, "send_q"), ("mistral", 3, "gather_kv")]
)
def test_windows_have_pools_of_their_own_too(
    windowed: Windowed, family: str, ranks: int, way: str
) -> None:
    path, cold = windowed(family, 16)
    with Rig(
        path,
        page_size=4,
        num_pages=60,
        window_pages=ranks * (least_window_pages(16, 4) + 2),
        ranks=ranks,
        remote=RemoteWays.all(Remote(way)),
        apart=True,
    ) as rig:
        chat(rig, 50, 6)
        check_all(rig, cold)


def test_a_token_that_does_not_travel_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: nobody takes in what other ranks have sampled."""
    monkeypatch.setattr(SampledTokens, "write", lambda *_: None)
    path = models("llama")
    remote = RemoteWays.all(Remote.GATHER_KV)
    with Rig(path, page_size=4, num_pages=40, ranks=2, remote=remote, apart=True) as rig:
        rig.ask(words(1, 21), 12)
        with pytest.raises(AssertionError):
            check_all(rig, Cold(path))
