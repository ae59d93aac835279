"""Every kind of attention with every page dtype: any journey gives the bytes of the cold pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phloem.core.plan import StepPlan, StepResult
from phloem.kernels import codec
from phloem.tiers import TierConfig
from phloem.worker.runner import Runner
from phloem.worker.verify import FreePages
from tests.parity.conftest import Models
from tests.parity.exact import check_exact, sum_row_by_row
from tests.parity.rig import Cold, Rig
from tests.parity.test_journeys import words

# (kind, dtype, page size, pages a chunk): of latents and heads each dtype and each page size meet
# each other, but for kinds of windows. `test_ranks_exact.py` has the same on several ranks.
CELLS = [
    ("llama", "fp32", 1, 3),
    ("llama", "bf16", 4, 1),
    ("llama", "int8", 16, 2),
    ("llama", "fp8", 1, 2),
    ("llama", "fp4", 4, 3),
    ("v2-lite", "int8", 4, 1),
    ("v2-yarn", "bf16", 1, 3),
    ("v3", "fp8", 4, 3),
    ("v3", "fp4", 1, 1),
    ("v3-yarn", "int8", 1, 2),
    ("v3-yarn", "fp32", 16, 1),
    ("v3-halves", "fp4", 16, 2),
    ("gpt_oss", "int8", 4, 2),
    ("gemma2", "fp4", 4, 1),
    ("mistral", "fp8", 4, 3),
]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_row_by_row(monkeypatch)


def shape_of(dtype: str, page_size: int, pages: int) -> dict[str, object]:
    return {
        "kernels": "reference",
        "kv_dtype": dtype,
        "page_size": page_size,
        "num_pages": 72 // page_size if page_size < 16 else 10,
        "max_prefill_tokens": max(pages * page_size, 4),
    }


def journey(rig: Rig, history: list[int], turns: int) -> list[int]:
    """Two chats by turns, in chunks, beside each other; the device holds hardly more than one."""
    other = words(70, 5)
    for turn in range(turns):
        first, second = rig.add(history, 4), rig.add(other, 3)
        rig.loop.run_until_idle()
        history = history + rig.answers[first].tokens + words(10 + turn, 5)
        other = other + rig.answers[second].tokens + words(30 + turn, 6)
    return history


@pytest.mark.parametrize(
    ("kind", "dtype", "page_size", "pages"),
    [
        # Half by default: `test_rank_matrix.py` has most of these again on several ranks.
        pytest.param(*cell, marks=() if i % 2 else pytest.mark.long)
        for i, cell in enumerate(CELLS)
    ],
)
def test_device_host_storage_and_restart_equal_cold_to_the_last_bit(
    models: Models, tmp_path: Path, kind: str, dtype: str, page_size: int, pages: int
) -> None:
    path, shape = models(kind), shape_of(dtype, page_size, pages)
    cold = Cold(path, kernels="reference", kv_dtype=dtype)
    shape["host_pages"] = 4 * int(str(shape["num_pages"]))
    shape["tiers"] = TierConfig(prefetch_policy="wait_complete")
    history = words(1, 14)
    with Rig(path, **shape, store=tmp_path) as rig:
        history = journey(rig, history, 4)
        sources = [a.sources for a in rig.answers.values()]
        assert sum(s.device for s in sources) > 0
        assert check_exact(rig, cold) > 0
    with Rig(path, **shape, store=tmp_path) as rig:
        answer = rig.ask(history, 3)
        assert answer.sources.storage > 0
        rig.cache.evict(rig.cache.evictable_pages)
        assert rig.ask(history + answer.tokens + words(99, 3), 2).sources.host > 0
        assert check_exact(rig, cold) > 0


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks"),
    [
        ("llama", "int8", 2),
        ("v3", "fp8", 2),
        *(
            pytest.param(*cell, marks=pytest.mark.long)
            for cell in (("llama", "fp4", 3), ("v3", "int8", 3), ("v2-yarn", "bf16", 2))
        ),
    ],
)
def test_processes_equal_cold_to_the_last_bit(
    models: Models, tmp_path: Path, kind: str, dtype: str, ranks: int
) -> None:
    """Ranks that map each other's pages; then one rank alone finds what they have stored."""
    path, cold = models(kind), Cold(models(kind), kernels="reference", kv_dtype=dtype)
    shape = shape_of(dtype, 4, 2) | {"host_pages": 60}
    shape["tiers"] = TierConfig(prefetch_policy="wait_complete")
    with Rig(path, **shape, store=tmp_path, ranks=ranks, processes=True) as rig:
        history = journey(rig, words(1, 14), 3)
        assert sum(a.cached for a in rig.answers.values()) > 0
        assert check_exact(rig, cold) > 0
    with Rig(path, **shape, store=tmp_path) as rig:
        assert rig.ask(history, 2).sources.storage > 0
        assert check_exact(rig, cold) > 0


def test_o14_pages_of_another_dtype_are_never_read(models: Models, tmp_path: Path) -> None:
    """int8 and fp8 pages have the same size: only their keys tell them apart."""
    path, prompt = models("v3"), words(2, 21)
    config = TierConfig(prefetch_policy="wait_complete")
    for dtype, again in [("int8", False), ("fp8", False), ("fp4", False), ("int8", True)]:
        shape = shape_of(dtype, 4, 3) | {"host_pages": 40, "tiers": config}
        with Rig(path, **shape, store=tmp_path) as rig:
            assert rig.ask(prompt, 2).sources.storage == (20 if again else 0)


def chat(path: Path, cold: Cold, *, sabotage: Callable[[Rig], None] | None = None) -> None:
    """A prompt in chunks, then a longer one on its pages, which may have been damaged meanwhile."""
    with Rig(path, **shape_of("int8", 4, 2), host_pages=60) as rig:
        prompt = words(5, 21)
        answer = rig.ask(prompt, 3)
        if sabotage is not None:
            sabotage(rig)
        rig.ask(prompt + answer.tokens + words(6, 9), 2)
        check_exact(rig, cold)


@pytest.fixture(params=["llama", "v3"])
def packed(request: pytest.FixtureRequest, models: Models) -> tuple[Path, Cold]:
    path = models(request.param)
    return path, Cold(path, kernels="reference", kv_dtype="int8")


def test_the_chat_itself_is_green(packed: tuple[Path, Cold]) -> None:
    chat(*packed)


def first_ref(rig: Rig) -> int:
    """Of the prompt's second page, on the device."""
    (node,) = [n for n in rig.cache.state.tree.nodes.values() if n.num_pages > 3]
    return int(node.ref_list()[1])


def flip_a_bit_of_a_scale(rig: Rig) -> None:
    ref, spec = first_ref(rig), rig.loaded.spec
    page = bytearray(rig.loaded.worker.read_page(ref))
    page[spec.row_bytes - 2] ^= 1
    rig.loaded.pool.write_page(ref, bytes(page))


def move_a_code_by_one(rig: Rig) -> None:
    ref = first_ref(rig)
    page = bytearray(rig.loaded.worker.read_page(ref))
    page[0] = (page[0] + 1) % 256
    rig.loaded.pool.write_page(ref, bytes(page))


def swap_two_tokens(rig: Rig) -> None:
    ref, size = first_ref(rig), rig.loaded.spec.row_bytes
    page = rig.loaded.worker.read_page(ref)
    rig.loaded.pool.write_page(ref, page[size : 2 * size] + page[:size] + page[2 * size :])


@pytest.mark.parametrize("sabotage", [flip_a_bit_of_a_scale, move_a_code_by_one, swap_two_tokens])
def test_a_damaged_packed_page_is_noticed(
    packed: tuple[Path, Cold], sabotage: Callable[[Rig], None]
) -> None:
    with pytest.raises(AssertionError):
        chat(*packed, sabotage=sabotage)


def scale_of_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """One scale for whatever is written together, as one of a page would be."""
    original = codec._scales

    def scales(piece: torch.Tensor, largest: float) -> torch.Tensor:
        return original(piece.abs().amax(dim=0, keepdim=True).expand(piece.shape), largest)

    patch.setattr(codec, "_scales", scales)


def read_before_it_is_packed(patch: pytest.MonkeyPatch) -> None:
    """What a step computes itself is read as it was computed, not as its page holds it."""
    fresh: dict[bytes, torch.Tensor] = {}
    encode, decode, run = codec.PackedCodec.encode, codec.PackedCodec.decode, Runner.run

    def note(self: codec.PackedCodec, rows: torch.Tensor) -> torch.Tensor:
        stored = encode(self, rows)
        for row, data in zip(rows.flatten(0, -2), stored.flatten(0, -2), strict=True):
            fresh[data.numpy().tobytes()] = row.clone()
        return stored

    def recall(self: codec.PackedCodec, stored: torch.Tensor) -> torch.Tensor:
        rows = decode(self, stored)
        for row, data in zip(rows.view(-1, self.head_dim), stored.flatten(0, -2), strict=True):
            row.copy_(fresh.get(data.numpy().tobytes(), row))
        return rows

    def forget(self: Runner, plan: StepPlan, free: FreePages | None) -> StepResult:
        fresh.clear()
        return run(self, plan, free)

    patch.setattr(codec.PackedCodec, "encode", note)
    patch.setattr(codec.PackedCodec, "decode", recall)
    patch.setattr(Runner, "run", forget)


@pytest.mark.parametrize("mutate", [scale_of_all_tokens, read_before_it_is_packed])
def test_a_page_that_depends_on_chunking_is_noticed(
    packed: tuple[Path, Cold],
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The oracle has the same fault: it is the chunks that give it away."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        chat(*packed)
