"""`--kv-dtype` and latent attention in the whole engine: text in, text out, restarts, facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.core.request import SamplingParams
from phloem.engine import startup_rows
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_quantised import from_storage, open_llm
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_checkpoint, make_latent
from tests.parity.test_journeys import words

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = words(1, 41)


@pytest.fixture(scope="module", params=["llama", "v3-yarn"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv") / request.param
    (make_checkpoint if request.param == "llama" else make_latent)(request.param, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_a_directory_serves_one_dtype_at_a_time(model: Path, tmp_path: Path) -> None:
    """int8, fp8 and the model's own pages are kept side by side and never mistaken."""
    store = str(tmp_path / "store")
    answers: dict[str, list[int]] = {}
    for dtype, cached in [("auto", 0), ("int8", 0), ("fp8", 0), ("int8", 40), ("auto", 40)]:
        with open_llm(model, storage=store, kv_dtype=dtype) as llm:
            found = from_storage(llm)
            assert found == cached, f"{found} tokens of {dtype} came from storage"
            tokens = llm.generate(PROMPT, GREEDY)[0].token_ids
            assert answers.setdefault(dtype, tokens) == tokens


def test_the_start_up_table_names_the_dtype_of_pages(model: Path) -> None:
    with open_llm(model, kv_dtype="int8") as llm:
        rows = dict(startup_rows(llm._core.facts))
    assert rows["dtype"] == "fp32, KV pages in int8"
    with open_llm(model) as llm:
        assert dict(startup_rows(llm._core.facts))["dtype"] == "fp32"


def test_other_kernels_find_the_pages(model: Path, tmp_path: Path) -> None:
    """Kernels are no part of a key: what PyTorch's have packed native ones read, and back."""
    native_library()
    store = str(tmp_path / "store")
    for kernels, cached in [("torch", 0), ("native", 40), ("torch", 40)]:
        with open_llm(model, storage=store, kv_dtype="int8", kernels=kernels) as llm:
            assert llm._core.facts.kernels == kernels
            assert from_storage(llm) == cached
