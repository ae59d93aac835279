"""Host memory and storage of ranks that share no memory: those of the leader, over links.

Ranks are threads with pools and token buffers of their own. Freed pages are NaN.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from phloem.core.remote import Remote, RemoteWays
from phloem.core.request import FinishReason
from phloem.core.transfer import Transfer, TransferKind
from phloem.kv.sizing import least_window_pages
from phloem.tiers import TierConfig
from phloem.transfer import LeaderGate, PageServer, TransferHooks
from phloem.transfer.page_link import Message
from tests.parity.conftest import Models, Windowed
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words
from tests.parity.test_tiers import chat

CELLS = [
    ("llama", ((2, 1), (1, 1), (2, 2)), "send_q", "write_back", True),
    ("v3", ((1, 2), (1, 1), (3, 1)), "gather_kv", "write_through", False),
]


@pytest.mark.parametrize(("kind", "meshes", "way", "policy", "overlap"), CELLS, ids=str)
def test_chats_through_host_and_storage(
    models: Models,
    tmp_path: Path,
    *,
    kind: str,
    meshes: tuple[tuple[int, int], ...],
    way: str,
    policy: str,
    overlap: bool,
) -> None:
    """What ranks apart have stored one rank reads, and other ranks apart. Red if a page of another
    rank is not what it has computed, is read before it is there, or comes to another place."""
    path, cold = models(kind), Cold(models(kind))
    for turn, (cp, tp) in enumerate(meshes):
        apart = {"ranks": cp, "tp": tp, "apart": True, "remote": RemoteWays.all(Remote(way))}
        with Rig(
            path,
            page_size=4,
            num_pages=24,
            host_pages=100,
            store=tmp_path,
            overlap=overlap,
            tiers=TierConfig(write_policy=policy, prefetch_policy="wait_complete"),
            transfer_hooks=TransferHooks(whole_layers=True),
            **(apart if cp * tp > 1 else {}),
        ) as rig:
            rig.sees_all = False  # what ranks apart have made
            chat(rig, 50, 3 if turn else 8)
            sources = [answer.sources for answer in rig.answers.values()]
            assert sum(each.storage if turn else each.host for each in sources) > 0
            check_all(rig, cold)


@pytest.mark.parametrize(
    ("family", "ranks", "tp", "way"), [("mistral", 3, 1, "gather_kv"), ("gemma3", 2, 2, "send_q")]
)
def test_tails_of_windows_come_back_beside_their_full_pages(
    windowed: Windowed, *, family: str, ranks: int, tp: int, way: str
) -> None:
    """Two components, one of which has no bytes where all layers have a window."""
    path, cold = windowed(family, 16)
    with Rig(
        path,
        page_size=4,
        num_pages=40,
        window_pages=ranks * (least_window_pages(16, 4) + 2),
        host_pages=160,
        window_host_pages=80,
        ranks=ranks,
        tp=tp,
        remote=RemoteWays.all(Remote(way)),
        apart=True,
    ) as rig:
        chat(rig, 50, 3)
        rig.cache.evict(rig.cache.evictable_pages)
        again = [rig.add(answer.prompt + words(9, 7), 3) for answer in [*rig.answers.values()]]
        rig.loop.run_until_idle()
        assert sum(rig.answers[name].sources.host for name in again) > 0
        check_all(rig, cold)


def host_hit(path: Path, hooks: TransferHooks) -> Rig:
    """Two ranks apart, and a prompt all of whose full pages are on the host alone."""
    rig = Rig(
        path,
        page_size=4,
        num_pages=40,
        host_pages=160,
        ranks=2,
        remote=RemoteWays.all(Remote.GATHER_KV),
        apart=True,
        transfer_hooks=hooks,
    )
    rig.ask(words(1, 21), 2)
    rig.cache.evict(rig.cache.evictable_pages)
    return rig


def test_a_layer_that_nobody_waits_for_is_noticed(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutation: the load begins when the other rank has been through the step that reads it."""
    over = threading.Event()

    def before_chunk(transfer: Transfer, _position: int) -> None:
        assert transfer.kind is not TransferKind.LOAD_BACK or over.wait(60.0)

    def pass_by(_gate: object, _loads: tuple[int, ...], layer: int) -> None:
        if layer == 3:
            over.set()

    for gate in (LeaderGate, PageServer):
        monkeypatch.setattr(gate, "wait_layer", pass_by)
    path = models("llama")
    with host_hit(path, TransferHooks(before_chunk=before_chunk)) as rig:
        assert rig.ask(words(1, 21), 3).sources.host == 20
        with pytest.raises(AssertionError):
            check_all(rig, Cold(path))


def test_a_rank_that_dies_while_its_pages_are_loaded_ends_all(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step waits for a layer, and so does the leader's. Red if either waits on."""
    served: list[PageServer] = []
    serve = PageServer._take

    def take(server: PageServer, message: Message) -> None:
        served.append(server)
        serve(server, message)

    def before_chunk(transfer: Transfer, position: int) -> None:
        if transfer.kind is TransferKind.LOAD_BACK and position:
            served[0]._link.close()

    monkeypatch.setattr(PageServer, "_take", take)
    hooks = TransferHooks(before_chunk=before_chunk, whole_layers=True)
    with host_hit(models("llama"), hooks) as rig:
        answer = rig.ask(words(1, 21), 3)
        assert "rank 1 failed: its connection has closed" in (rig.loop.dead or "")
        assert answer.finish is FinishReason.ERROR
