"""`--quantization` in the whole engine: pages of one form are never served to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phloem.core.request import SamplingParams
from phloem.engine import LLM, EngineFacts, startup_rows
from phloem.engine.commands import UpdateWeights
from tests.engine.fakes import byte_tokenizer, fake_card
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_checkpoint
from tests.parity.test_journeys import words

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = words(1, 41)


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    native_library()


def checkpoint(folder: Path, seed: int) -> Path:
    make_checkpoint("llama", folder, seed=seed)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("kernels", "quantization", "blocks", "shown"),
    [
        ("native", "none", "Q4_1", True),
        ("native", "int8", "Q4_0", True),
        ("native", "q4", "Q4_1", False),  # it is what they use
        ("native", "none", None, False),  # the file has none
        ("torch", "none", "Q4_1", False),  # they could not use it
    ],
)
def test_the_start_up_table_recommends_q4_to_whom_it_helps(
    kernels: str, quantization: str, blocks: str | None, shown: bool
) -> None:
    """In a line that fits a terminal of 80 columns."""
    facts = EngineFacts(
        card=fake_card(),
        weight_bytes=1 << 20,
        activation_bytes=0,
        threads=1,
        load_s=0.0,
        prefix_cache=True,
        schedule_policy="lpm",
        kernels=kernels,
        quantization=quantization,
        four_bit_blocks=blocks,
    )
    rows = dict(startup_rows(facts))
    assert rows["weights"] == f"1.0 MiB, quantization {quantization}"
    assert ("recommended" in rows) is shown
    assert len(rows.get("recommended", "")) <= 63


def open_llm(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model),
        dtype="fp32",
        page_size=4,
        num_pages=60,
        max_model_len=128,
        prefetch_policy="wait_complete",
        host_memory="1MB",
        storage_size="32MB",
        threads=1,
        **settings,
    )


def from_storage(llm: LLM) -> int:
    return llm.generate(PROMPT, GREEDY)[0].cached.storage


def test_stored_pages_of_another_quantisation_never_hit(tmp_path: Path) -> None:
    """The same file as floats and as int8: each finds its own pages after a restart, no other's."""
    model = checkpoint(tmp_path / "model", 1)
    settings = {"storage": str(tmp_path / "kept")}
    for quantization in ("none", "int8"):
        with open_llm(model, quantization=quantization, **settings) as llm:
            assert from_storage(llm) == 0
        with open_llm(model, quantization=quantization, **settings) as llm:
            assert from_storage(llm) == 40


def test_weights_loaded_while_serving_are_stored_under_their_quantisation(tmp_path: Path) -> None:
    """Pages stored after the change are found by a new int8 engine, not by one of floats."""
    old, new = checkpoint(tmp_path / "old", 1), checkpoint(tmp_path / "new", 2)
    settings = {"storage": str(tmp_path / "kept")}
    with open_llm(old, quantization="int8", **settings) as llm:
        llm.operate(UpdateWeights(str(new)))
        assert from_storage(llm) == 0
    with open_llm(new, **settings) as llm:
        assert from_storage(llm) == 0
    with open_llm(new, quantization="int8", **settings) as llm:
        assert from_storage(llm) == 40
