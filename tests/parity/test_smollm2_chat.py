"""SmolLM2 in fp32, a chat of twelve turns: what comes back from host and storage is cold's.

The logits of every position that any turn computes are compared with those of one pass over the
whole chat with nothing cached. All prompts are made of cold's tokens, so turns are comparable
whatever was sampled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from phloem.cache import check_invariants
from phloem.core.store import PageStore
from phloem.engine.build_tiers import open_storage
from phloem.tiers import TierConfig
from tests.models.test_smollm2 import find_gguf
from tests.parity.rig import Answer, Rig, close_enough

pytestmark = pytest.mark.timeout(300)

PAGE = 16
TURNS, ASKED, ANSWERED = 12, 13, 2  # 15 tokens a turn: prompts end anywhere in a page
OTHERS = 10 * PAGE  # tokens of another prompt, which comes between the turns
SHAPE = {"page_size": PAGE, "num_pages": 13, "host_pages": 52}  # the chat alone fills the device
STORE_BYTES = 128 << 20  # a page has 720 KiB


@dataclass(frozen=True)
class Chat:
    """`prompts[t]` is the whole chat up to turn t, answers by cold; `logits` (tokens, vocab)."""

    prompts: list[list[int]]
    answers: list[list[int]]
    logits: torch.Tensor


def words(seed: int, count: int) -> list[int]:
    """Random ids of ordinary tokens."""
    rng = random.Random(seed)
    return [rng.randrange(2000, 40000) for _ in range(count)]


def make_chat(cold: Rig) -> Chat:
    """The chat as an engine without any cache has it."""
    history: list[int] = []
    prompts, answers = [], []
    for turn in range(TURNS):
        prompts.append(history + words(turn, ASKED))
        answers.append(cold.ask(prompts[-1], ANSWERED).tokens)
        history = prompts[-1] + answers[-1]
    cold.logits.clear()
    cold.ask(history, 1)
    (by_position,) = cold.logits.values()
    return Chat(prompts, answers, torch.stack([by_position[i] for i in range(len(history))]))


@pytest.fixture(scope="module")
def chat() -> Chat:
    with Rig(find_gguf(), page_size=PAGE, num_pages=13, prefix_cache=False) as cold:
        return make_chat(cold)


def turns(rig: Rig, chat: Chat, which: range) -> list[Answer]:
    """Ask these turns; between them the device forgets the chat over another prompt."""
    out = []
    for turn in which:
        rig.logits.clear()
        answer = rig.ask(chat.prompts[turn], ANSWERED)
        out.append(answer)
        compare(rig, chat, turn, answer)
        rig.ask(words(99, OTHERS), 1)
    return out


def compare(rig: Rig, chat: Chat, turn: int, answer: Answer) -> None:
    """Tokens and logits of one turn against cold's."""
    assert answer.tokens == chat.answers[turn]
    (by_position,) = rig.logits.values()
    start = answer.cached
    end = len(chat.prompts[turn]) + ANSWERED - 1  # the last token's logits are never computed
    assert sorted(by_position)[: end - start] == list(range(start, end))
    for position in range(start, end):
        assert close_enough(by_position[position], chat.logits[position]), (
            f"turn {turn}, position {position}: {answer.sources}"
        )


def forget(rig: Rig) -> None:
    """Device and host lose everything that nobody uses; storage keeps what it has."""
    assert rig.scheduler.tiers is not None
    assert rig.scheduler.tiers.flush(60.0) == 0
    rig.cache.evict(rig.cache.total_pages)
    rig.cache.leader.host.evict(rig.cache.leader.host.capacity)
    assert rig.cache.free_pages == rig.cache.total_pages


def store_at(path: Path) -> PageStore:
    return open_storage(str(path), STORE_BYTES)


@pytest.mark.parametrize(
    "policy",
    [
        "write_through",
        pytest.param("write_through_selective", marks=pytest.mark.long),
        pytest.param("write_back", marks=pytest.mark.long),
    ],
)
def test_a_chat_over_host_storage_and_a_restart_has_colds_logits(
    chat: Chat, tmp_path: Path, policy: str
) -> None:
    """Red if any tier gives back other bytes, or if none of them is asked."""
    config = TierConfig(write_policy=policy, prefetch_policy="wait_complete")
    with Rig(find_gguf(), **SHAPE, store=store_at(tmp_path), tiers=config) as rig:
        early = turns(rig, chat, range(4))
        forget(rig)
        middle = turns(rig, chat, range(4, 8))
        check_invariants(rig.cache, idle=True)
    with Rig(find_gguf(), **SHAPE, store=store_at(tmp_path), tiers=config) as rig:
        late = turns(rig, chat, range(8, TURNS))
        check_invariants(rig.cache, idle=True)
    assert early[0].cached == 0
    assert sum(a.sources.host for a in middle + late) > 0
    if policy == "write_through_selective":  # it stores what is used twice: not every page
        assert sum(a.sources.storage for a in middle + late) > 0
        return
    for name, answer in (("after forgetting", middle[0]), ("after a restart", late[0])):
        full = (len(answer.prompt) - ASKED - 1) // PAGE * PAGE  # its last token was never computed
        assert answer.sources.storage == full, f"{name}: {answer.sources}, {full} were stored"
    assert all(a.cached > 0 for a in [*early[2:], *middle, *late])
