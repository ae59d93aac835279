"""Models with windows against transformers: cold, sliding, restarted lower down.

Whatever must not be read is NaN: freed pages, pages before a restart, window pages of a neighbour.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phloem.core.errors import ConfigError
from tests.long import checkered
from tests.models.checkpoints import WINDOWED, make_checkpoint, make_windowed
from tests.models.driver import FULL, WINDOW, Driver, load
from tests.models.test_against_transformers import (
    TOLERANCE,
    Case,
    kernels,
    prompt,
    relative_error,
)

__all__ = ["kernels"]

WINDOWS, PAGES = (4, 8, 16, 64), (1, 4, 16, 32)


def pairwise(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Few combinations in which every two values of different axes meet."""
    wanted = {
        pair
        for (i, a), (j, b) in itertools.combinations(enumerate(axes), 2)
        for pair in itertools.product(((i, x) for x in a), ((j, y) for y in b))
    }
    chosen = []
    while wanted:
        best = max(itertools.product(*axes), key=lambda c: len(wanted & _pairs(c)))
        wanted -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination: tuple[Any, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))


CASES = pairwise(tuple(WINDOWED), WINDOWS, PAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(family, window, further fields) -> a checkpoint and its oracle, made once."""

    @cache
    def make(family: str, window: int, **extra: Any) -> Case:
        folder: Path = tmp_path_factory.mktemp(f"{family}-{window}")
        return Case(folder, make_windowed(family, folder, window=window, **extra))

    return make


def _chunk(pages: int | None, page_size: int, window: int) -> int:
    """Tokens of a chunk; not so few that a long prompt takes hundreds of steps."""
    return 512 if pages is None else max(pages * page_size, window // 8)


def case_id(value: object) -> str:
    return str(value)


@pytest.mark.parametrize(
    ("family", "window", "page_size", "pages_per_chunk", "kernels"),
    checkered(CASES, [1, 3, None], ["torch", "native"]),
    indirect=["kernels"],
    ids=case_id,
)
def test_logits_at_every_position_while_windows_slide(
    model, family, window, page_size, pages_per_chunk, kernels
):
    """Prompts of six windows in chunks, then decodes; what falls out of the window is NaN at once
    and its page another row's."""
    case = model(family, window)
    ids = prompt(6 * window + 5)
    driver = Driver(load(case.path, page_size=page_size, kernels=kernels))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, _chunk(pages_per_chunk, page_size, window), window=window)
    for _ in range(2 * page_size if page_size < 16 else 5):
        driver.step(driver.decode(0))
        driver.slide(0, window)
    computed = ids + driver.sampled[0]
    got = driver.logits_of(0)
    assert got.shape[0] == len(computed) - 1
    assert relative_error(got, case.logits(computed)[:-1]) < TOLERANCE


@pytest.mark.parametrize(("family", "window", "page_size"), CASES[::2], ids=case_id)
def test_ragged_batches(model, family, window, page_size, kernels):
    """Prefills and decodes of many lengths share every step; each equals the oracle alone."""
    case = model(family, window)
    pages = 64 + 2048 // page_size
    driver = Driver(load(case.path, page_size=page_size, num_pages=pages, kernels=kernels))
    lengths = (1, window, window + 1, 3 * window - 1, 5 * window + 2)
    prompts = {row: prompt(length, row) for row, length in enumerate(lengths)}
    done = dict.fromkeys(prompts, 0)
    for row, ids in prompts.items():
        driver.admit(row, ids)
    for step in range(12):
        plans = []
        for row, ids in prompts.items():
            if step < row:
                continue
            if done[row] < len(ids):
                end = min(len(ids), done[row] + window + 3 * row)
                plans.append(driver.chunk(row, ids, done[row], end, sample=end == len(ids)))
                done[row] = end
            else:
                plans.append(driver.decode(row))
        driver.step(*plans)
        for row in prompts:
            if done[row]:
                driver.slide(row, window)
    for row, ids in prompts.items():
        computed = ids + driver.sampled[row]
        got = driver.logits_of(row)
        assert relative_error(got, case.logits(computed)[: len(got)]) < TOLERANCE
        assert case.would_say(ids, driver.sampled[row])


def test_the_reference_ops_agree_as_well(model):
    for family in WINDOWED:
        case = model(family, 8)
        ids = prompt(29)
        driver = Driver(load(case.path, page_size=4, kernels="reference"))
        driver.admit(0, ids)
        driver.prefill(0, ids, 0, 13, window=8)
        assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


@pytest.mark.parametrize("family", sorted(WINDOWED))
def test_bf16_stays_within_its_rounding(model, family, kernels):
    case = model(family, 8)
    ids = prompt(40)
    driver = Driver(load(case.path, page_size=16, dtype="bf16", kernels=kernels))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, 16, window=8)
    got, want = driver.logits_of(0), case.logits(ids)
    assert float((got - want).norm() / want.norm()) < 0.03


@pytest.mark.parametrize("family", sorted(WINDOWED))
@pytest.mark.parametrize("window", [1, 2, 8])
def test_o29_a_needle_is_seen_by_its_window_and_by_nobody_else(model, family, window, kernels):
    """One layer: token j moves the logits of j ... j + W - 1, and not one bit of another's; so says
    transformers, and so do we."""
    kinds = {} if family == "mistral" else {"layer_types": ["sliding_attention"]}
    case = model(family, window, num_hidden_layers=1, **_frozen(kinds))
    ids = prompt(40)
    other = [*ids]
    other[11] = (ids[11] + 1) % 320
    seen = {}
    for name, logits in (("ours", _logits(case, kernels)), ("theirs", case.logits)):
        moved = (logits(ids) != logits(other)).any(dim=-1)
        seen[name] = np.flatnonzero(moved.numpy()).tolist()
    assert seen["ours"] == seen["theirs"] == list(range(11, 11 + window))


def _frozen(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _Types(value) for name, value in fields.items()}


class _Types(list):
    """A list that can be a key."""

    def __hash__(self) -> int:
        return hash(tuple(self))


def _logits(case: Case, kernels: str) -> Any:
    def run(ids: list[int]) -> torch.Tensor:
        driver = Driver(load(case.path, page_size=4, kernels=kernels))
        driver.admit(0, ids)
        driver.prefill(0, ids, 0, len(ids))
        return driver.logits_of(0)

    return run


@dataclass
class Ends:
    """Where a restart for `kept` full pages may begin, and what must come out right."""

    window: int
    layers: int
    page_size: int
    kept: int

    @property
    def tail_pages(self) -> int:
        return -(-(self.window - 1) // self.page_size)

    @property
    def latest(self) -> int:
        """The last page at which a restart without any window page may begin."""
        first_right = (self.kept * self.page_size - (self.window - 1)) // self.page_size
        reach = (self.layers - 1) * (self.window - 1)
        return max(0, (first_right * self.page_size - reach) // self.page_size)

    def starts(self, most: int) -> list[int]:
        """All legal pages; where there are many, the last ones and some of the others."""
        every = list(range(self.latest + 1))
        if len(every) <= most:
            return every
        return every[: -most // 2 : max(1, 2 * len(every) // most)] + every[-most // 2 :]


def _restarted(
    model: Any, family: str, window: int, page_size: int, kernels: str
) -> tuple[Case, Driver, list[int], Ends]:
    """A driver whose row 0 has computed the first half of a prompt."""
    case = model(family, window)
    pages = 192 + 2048 // page_size
    driver = Driver(load(case.path, page_size=page_size, num_pages=pages, kernels=kernels))
    config = driver.loaded.config
    layers = len(config.component_layers[WINDOW])
    # enough for the reach of all layers, and some pages before it
    kept = -(-(layers + 1) * window // page_size) + 3
    ids = prompt(min(kept * page_size + window + 2 * page_size + 3, 500))
    driver.admit(0, ids[: kept * page_size], room=0)
    driver.prefill(0, ids[: kept * page_size], 0, 3 * page_size)
    return case, driver, ids, Ends(window, layers, page_size, kept)


def _check_restart(case: Case, driver: Driver, ids: list[int], ends: Ends) -> None:
    """Logits from the end of what was kept, and the bytes of its tail, which may be committed."""
    want = case.logits(ids)[ends.kept * ends.page_size :]
    got = driver.logits_of(1)[-len(want) :]
    assert relative_error(got, want) < TOLERANCE
    for number in range(max(0, ends.kept - ends.tail_pages), ends.kept):
        mine, theirs = (driver.page(row, number, WINDOW) for row in (1, 0))
        assert relative_error(mine, theirs) < TOLERANCE, f"page {number} of the tail"


@pytest.mark.parametrize(
    ("family", "window", "page_size", "pages_per_chunk", "kernels"),
    checkered(CASES, [2, None], ["torch", "native"]),
    indirect=["kernels"],
    ids=case_id,
)
def test_a_restart_lower_down_equals_cold(
    model, family, window, page_size, pages_per_chunk, kernels
):
    """At every legal position: full pages kept, no window page alive."""
    case, driver, ids, ends = _restarted(model, family, window, page_size, kernels)
    before = [driver.worker.read_page(int(ref)) for ref in driver.refs(0, FULL)]
    chunk = _chunk(pages_per_chunk, page_size, window)
    for start in ends.starts(8):
        driver.restart(1, ids, kept=ends.kept, start=start)
        driver.prefill(1, ids, start * page_size, chunk)
        _check_restart(case, driver, ids, ends)
        driver.release(1, shared_pages=ends.kept)
    assert before == [driver.worker.read_page(int(ref)) for ref in driver.refs(0, FULL)]


@pytest.mark.parametrize(("family", "window", "page_size"), CASES, ids=case_id)
def test_a_restart_at_a_checkpoint_equals_cold(model, family, window, page_size, kernels):
    """The window pages before it are alive: every logit from there on is right, not only the last
    ones, and so are all its window pages."""
    case, driver, ids, ends = _restarted(model, family, window, page_size, kernels)
    want = case.logits(ids)
    lowest = ends.tail_pages
    for start in sorted({lowest, (lowest + ends.kept) // 2, ends.kept - 1, ends.kept}):
        driver.restart(1, ids, kept=ends.kept, start=start, tail=ends.tail_pages)
        driver.prefill(1, ids, start * page_size, 3 * page_size, window=0)
        assert relative_error(driver.logits_of(1), want[start * page_size :]) < TOLERANCE
        for number in range(start, ends.kept):
            mine, theirs = (driver.page(row, number, WINDOW) for row in (1, 0))
            assert relative_error(mine, theirs) < TOLERANCE
        driver.release(1, shared_pages=ends.kept)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "gpt_oss"])
def test_a_restart_without_the_reach_of_all_layers_is_wrong(model, family, kernels):
    """Why it must begin so far down: with only the window before the tail, logits differ."""
    case, driver, ids, ends = _restarted(model, family, 16, 4, kernels)
    short = (ends.kept * 4 - 15) // 4
    assert short > ends.latest
    driver.restart(1, ids, kept=ends.kept, start=short)
    driver.prefill(1, ids, short * 4, len(ids))
    with pytest.raises(AssertionError):
        _check_restart(case, driver, ids, ends)


def test_full_pages_that_are_kept_are_not_written(model, kernels):
    """Writing them would do harm: a restart computes them from a window that was not there."""
    _, driver, ids, ends = _restarted(model, "gpt_oss", 16, 4, kernels)
    driver.restart(1, ids, kept=ends.kept, start=ends.latest)
    driver._restarts[1] = (0, ends.latest * 4)  # as if nobody had said write_from
    before = [driver.worker.read_page(int(ref)) for ref in driver.refs(0, FULL)]
    driver.prefill(1, ids, ends.latest * 4, len(ids))
    changed = [driver.worker.read_page(int(ref)) for ref in driver.refs(0, FULL)]
    assert before[: ends.latest] == changed[: ends.latest]
    first = driver.page(1, ends.latest, FULL)
    want = torch.from_numpy(np.frombuffer(before[ends.latest], dtype=np.float32).copy())
    assert relative_error(first, want) > TOLERANCE


def test_the_language_model_of_a_gemma3_that_also_sees(model, tmp_path):
    """As checkpoints of 4B and more are published: a text_config, a prefix before each name."""
    case = model("gemma3", 8)
    raw = json.loads((case.path / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": raw, "vision_config": {}, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(case.path / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.patch.weight"] = torch.ones(3)
    save_file(renamed, tmp_path / "model.safetensors")
    ids = prompt(50)
    driver = Driver(load(tmp_path, page_size=4))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, 12, window=8)
    assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


def test_a_lost_tensor_of_a_window_family_is_named(model, tmp_path):
    """Sinks and the norms behind attention and MLP are asked for like all others."""
    for family, name in (
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gemma2", "model.layers.2.post_feedforward_layernorm.weight"),
    ):
        case = model(family, 8)
        folder = tmp_path / family
        folder.mkdir()
        (folder / "config.json").write_bytes((case.path / "config.json").read_bytes())
        tensors = load_file(case.path / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=f"has no tensor {name}"):
            load(folder, page_size=4)


def test_window_pools_that_cannot_be_are_refused(model, tmp_path):
    path = model("gemma2", 8).path
    with pytest.raises(ConfigError, match="window_pages must be at least 1, got 0"):
        load(path, page_size=4, window_pages=0)
    with pytest.raises(ConfigError, match="needs num_pages and window_pages"):
        load(path, page_size=4, num_pages=None, kv_bytes=1 << 20)
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match="no layer of the model has a window"):
        load(tmp_path, page_size=4, window_pages=9)


def test_a_model_of_windows_alone_has_a_spine_without_bytes(model):
    """Full pages exist, cost nothing, and can be freed, poisoned and read as others."""
    loaded, _ = load(model("mistral", 8).path, page_size=4, num_pages=1000, window_pages=20)
    assert [spec.page_bytes for spec in loaded.specs] == [0, 2 * 3 * 2 * 16 * 4 * 4]
    assert loaded.pool.buffer.data.nbytes == 0
    loaded.pool.fill_nan(np.arange(3))
    assert loaded.worker.read_page(7) == b""
