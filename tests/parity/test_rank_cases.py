"""Faults that users of other engines met with context parallelism: O-28 and O-29, over the model.

The control plane's half of O-27 and O-28 is in `tests/sched/test_cases_ranks.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.core.remote import Remote, RemoteWays
from tests.parity.conftest import Models
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words

PAGE = 4
WAYS = {
    "direct": RemoteWays(),
    "gather_kv": RemoteWays.all(Remote.GATHER_KV),
    "send_q": RemoteWays.all(Remote.SEND_Q),
    "mixed": RemoteWays(cached=Remote.SEND_Q, own=Remote.GATHER_KV),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cp", [2, 4])
def test_o28_any_hit_and_any_number_of_new_tokens(
    tiny: Path, cold: Cold, cp: int, way: str
) -> None:
    """What is cached is counted in whole pages, whatever there is to compute and however it is
    divided. Red if a length is padded to the ranks before the prefix is taken from it."""
    with Rig(
        tiny, page_size=PAGE, num_pages=1200, max_running=16, ranks=cp, remote=WAYS[way]
    ) as rig:
        asked = {}
        for hit in (0, 1, PAGE, 3 * PAGE + 1):
            for new in range(1, 4 * cp + 2):
                head = words(1000 * hit + new, hit)
                if hit:
                    rig.add(head, 1)
                    rig.loop.run_until_idle()
                asked[rig.add(head + words(5000 * hit + new, new), 1)] = hit // PAGE * PAGE
        rig.loop.run_until_idle()
        for name, cached in asked.items():
            assert rig.answers[name].cached == cached, rig.answers[name]
        check_all(rig, cold)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "cp", "tp"), [("llama", 2, 1), ("v3", 3, 1), ("v2-lite", 1, 2)])
def test_o29_a_needle_on_another_rank_is_read(
    models: Models, kind: str, cp: int, tp: int, way: str
) -> None:
    """Two prompts that differ in their first token only, behind one to five cached pages: each hit
    gives its own answer. Red if attention on a hit sees the new tokens only, or its own rank's."""
    path, tail = models(kind), words(41, 2 * PAGE)
    with Rig(path, page_size=PAGE, num_pages=600, ranks=cp, tp=tp, remote=WAYS[way]) as rig:
        for pages in range(1, 6):
            head = words(40 + pages, pages * PAGE)
            other = [2 + (head[0] - 1) % 318, *head[1:]]
            for prompt in (head, other):
                rig.ask(prompt, 1)
                hit = rig.ask(prompt + tail, 3)
                assert hit.cached == pages * PAGE
        check_all(rig, Cold(path))
