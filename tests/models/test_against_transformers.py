"""The oracle: tiny random checkpoints, written to disk, in transformers and in Phloem."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.kernels.native_build import native_library
from tests.models.checkpoints import FAMILIES, make_checkpoint
from tests.models.driver import Driver, load

VOCAB = 320
TOLERANCE = 1e-4


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, relative to the spread of the wanted logits."""
    return float((got - want).abs().max() / want.abs().max())


@dataclass
class Case:
    path: object
    oracle: torch.nn.Module

    _known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Of every position (n, vocab), computed once."""
        key = tuple(ids)
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self.oracle(torch.tensor([ids])).logits[0].float()
        return self._known[key]

    def would_say(self, ids: list[int], answer: list[int]) -> bool:
        """Whether each token of `answer` is the best one after those before it: by induction, then,
        it is the greedy continuation of `ids`."""
        best = self.logits(ids + answer)[len(ids) - 1 : -1].argmax(dim=-1)
        return best.tolist() == answer


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return Case(folder, make_checkpoint(request.param, folder))


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> str:
    if request.param == "native":
        native_library()
    return request.param


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pages_per_chunk", [1, 2, 3, None])
def test_logits_at_every_position_in_any_chunking(case, page_size, pages_per_chunk, kernels):
    ids = prompt(53)
    driver = Driver(load(case.path, page_size=page_size, kernels=kernels))
    driver.admit(0, ids)
    chunk = len(ids) if pages_per_chunk is None else pages_per_chunk * page_size
    for start in range(0, len(ids), chunk):
        driver.step(driver.chunk(0, ids, start, min(start + chunk, len(ids))))
    assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_ragged_batches_of_prefills_and_decodes(case, page_size, kernels):
    """Rows in different states share every step; each equals the oracle alone on its tokens."""
    driver = Driver(load(case.path, page_size=page_size, kernels=kernels))
    prompts = {row: prompt(length, row) for row, length in enumerate((5, 37, 16, 1, 23))}
    done = dict.fromkeys(prompts, 0)
    for row, ids in prompts.items():
        driver.admit(row, ids)
    for step in range(14):
        plans = []
        for row, ids in prompts.items():
            if step < row:
                continue
            if done[row] < len(ids):
                end = min(len(ids), done[row] + 3 + 4 * row)
                plans.append(driver.chunk(row, ids, done[row], end, sample=end == len(ids)))
                done[row] = end
            else:
                plans.append(driver.decode(row))
        driver.step(*plans)
    for row, ids in prompts.items():
        computed = ids + driver.sampled[row]
        got = driver.logits_of(row)
        assert got.shape[0] == len(computed) - 1
        assert relative_error(got, case.logits(computed)[:-1]) < TOLERANCE
        assert case.would_say(ids, driver.sampled[row])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prefix_computed_by_another_row_is_reused(case, page_size, kernels):
    """The second row's table points at pages which the first one filled."""
    shared, tail = prompt(32), prompt(9, 1)
    driver = Driver(load(case.path, page_size=page_size, kernels=kernels))
    driver.admit(0, shared)
    driver.step(driver.chunk(0, shared, 0, len(shared)))
    ids = shared + tail
    driver.admit(1, ids, shared_with=0, shared_tokens=len(shared))
    driver.step(driver.chunk(1, ids, len(shared), len(ids)))
    want = case.logits(ids)[len(shared) :]
    assert relative_error(driver.logits_of(1), want) < TOLERANCE


def test_the_reference_ops_agree_as_well(case):
    ids = prompt(21)
    driver = Driver(load(case.path, page_size=4, kernels="reference"))
    driver.admit(0, ids)
    driver.step(driver.chunk(0, ids, 0, 13))
    driver.step(driver.chunk(0, ids, 13, 21))
    assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


def test_bf16_stays_within_its_rounding(case, kernels):
    """Against the fp32 oracle: an error of a few bf16 roundings (2^-8), and never a wild one."""
    ids = prompt(40)
    driver = Driver(load(case.path, page_size=16, dtype="bf16", kernels=kernels))
    driver.admit(0, ids)
    driver.step(driver.chunk(0, ids, 0, 16))
    driver.step(driver.chunk(0, ids, 16, 40))
    got, want = driver.logits_of(0), case.logits(ids)
    assert float((got - want).norm() / want.norm()) < 0.03
