"""What quantisation costs: perplexity of SmolLM2 on a novel, against its blocks as bf16."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from phloem.config.gguf import read_gguf
from phloem.core.tokens import tokens_from_bytes
from phloem.engine.tokenizer_gguf import gguf_tokenizer
from phloem.worker import Hooks, WorkerOptions, load_worker
from tests.kernels.native_build import native_library
from tests.models.driver import Driver
from tests.models.test_smollm2 import find_gguf

SHARED = Path(os.environ.get("PHLOEM_SHARED", Path(__file__).parents[3] / "shared"))
BOOKS = ("pride_and_prejudice_1342.txt", "war_and_peace_2600.txt")
ROW_TOKENS = 512


class Surprise:
    """Sums -log p of every token of `ids` after the first, as logits come by."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.total, self.count = 0.0, 0

    def __call__(self, serial: int, start: int, logits: torch.Tensor) -> None:
        ids = self.ids[start + 1 : start + 1 + len(logits)]
        logp = logits[: len(ids)].float().log_softmax(-1)
        self.total -= float(logp.gather(1, torch.tensor(ids)[:, None]).double().sum())
        self.count += len(ids)

    def forget(self, serial: int) -> None:
        """A row has a new tenant: what its rows have summed up counts all the same."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.total / self.count)


@pytest.fixture(scope="module", autouse=True)
def built():
    native_library()


def tokens_of(book: str, count: int) -> list[int]:
    """From within the book, past the licence."""
    path = SHARED / "data" / "text" / book
    if not path.is_file():
        pytest.skip(f"{path} is not at hand")
    text = path.read_text(encoding="utf-8")[20_000 : 20_000 + 8 * count]
    ids = tokens_from_bytes(gguf_tokenizer(read_gguf(find_gguf()).metadata).encode(text))
    assert len(ids) >= count
    return [int(token) for token in ids[:count]]


def worker(hook, quantization: str, dtype: str = "bf16") -> Driver:
    options = WorkerOptions(
        dtype=dtype,
        num_pages=ROW_TOKENS // 16 + 1,
        inline=True,
        kernels="native",
        quantization=quantization,
        hooks=Hooks(capture_logits=hook),
    )
    return Driver((load_worker(find_gguf(), options), hook))


def perplexity(ids: list[int], quantization: str) -> float:
    """Of stretches of ROW_TOKENS, each from its own beginning."""
    surprise = Surprise()
    for low in range(0, len(ids), ROW_TOKENS):
        surprise.ids = ids[low : low + ROW_TOKENS]
        if low == 0:
            driver = worker(surprise, quantization)
            driver.admit(0, surprise.ids, room=0)
        driver.step(driver.chunk(0, surprise.ids, 0, len(surprise.ids)))
    return surprise.perplexity


def check(ids: list[int]) -> None:
    exact = perplexity(ids, "none")
    found = {name: perplexity(ids, name) / exact for name in ("int8", "q4")}
    print(f"{len(ids)} tokens: none {exact:.3f}, ratios {found}")
    assert abs(found["int8"] - 1) < 0.01
    assert abs(found["q4"] - 1) < 0.005


@pytest.mark.timeout(600)  # usually 20 s; three models on a busy machine
def test_perplexity_of_a_page():
    """int8 within 1 % of the dequantised bf16 model; q4, which has the same weights, within 0.5 %.

    A scale that is lost, or a block whose halves are swapped, is far outside.
    """
    check(tokens_of(BOOKS[0], ROW_TOKENS))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("book", BOOKS)
def test_perplexity_of_a_chapter(book):
    check(tokens_of(book, 16 * ROW_TOKENS))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_q4_logits_of_the_real_model_equal_its_blocks_dequantised():
    """In fp32, at every position of 100 tokens: within 5e-4 of the greatest logit."""
    ids, seen = tokens_of(BOOKS[0], 100), {}
    for name in ("none", "q4"):
        parts: list[torch.Tensor] = []
        driver = worker(lambda serial, start, logits: parts.append(logits.clone()), name, "fp32")  # noqa: B023
        driver.admit(0, ids, room=0)
        driver.step(driver.chunk(0, ids, 0, len(ids)))
        seen[name] = torch.cat(parts)
    error = (seen["q4"] - seen["none"]).abs().max() / seen["none"].abs().max()
    print(f"q4 against dequantised: {error:.1e}")
    assert error < 5e-4
