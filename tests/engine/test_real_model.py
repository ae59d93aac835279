"""A tiny random Llama in the real engine process, against the same weights in transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from phloem.config import CacheOptions, Config, ModelOptions, RuntimeOptions, SchedulerOptions
from phloem.core.errors import ConfigError
from phloem.core.request import FinishReason, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.engine import AsyncEngine
from phloem.engine.api import TextRequest
from phloem.engine.assembly import merge_chunks
from phloem.engine.llm import LLM
from tests.engine.fakes import byte_tokenizer
from tests.models.checkpoints import make_checkpoint

NUM_TOKENS = 12


@dataclass(frozen=True)
class Tiny:
    folder: Path
    model: transformers.PreTrainedModel

    def agrees(self, prompt: list[int], answer: Sequence[int]) -> bool:
        """Whether transformers would have chosen every token of a greedy answer."""
        ids = torch.tensor([[*prompt, *answer]])
        with torch.inference_mode():
            best = self.model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        return len(answer) == NUM_TOKENS and best.tolist() == list(answer)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    model = make_checkpoint("llama", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return Tiny(folder, model)


def tiny_config(folder: Path, **scheduler: int) -> Config:
    return Config(
        model=ModelOptions(model=str(folder), dtype="fp32"),
        cache=CacheOptions(num_pages=512, page_size=4),
        scheduler=SchedulerOptions(**scheduler),
        runtime=RuntimeOptions(threads=1),
    )


def request(name: str, prompt: list[int], count: int = NUM_TOKENS) -> TextRequest:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return TextRequest(request_id=name, tokens=tokens_to_bytes(prompt), sampling=sampling)


PROMPTS = [[(7 * i + j * j) % 256 for j in range(5 + 3 * i)] for i in range(12)]


async def test_engine_process_says_what_transformers_says(tiny: Tiny) -> None:
    """All at once (mixed batches, chunked prefill), then again from cached pages."""
    engine = AsyncEngine.launch(tiny_config(tiny.folder, max_prefill_tokens=16))
    assert (engine.card.architecture, engine.card.vocab_size) == ("llama", 320)

    async def one(index: int, turn: str) -> tuple[list[int], int]:
        stream = engine.generate(request(f"{turn}{index}", PROMPTS[index]))
        whole = merge_chunks([chunk async for chunk in stream])
        return list(whole.tokens), whole.cached.total

    cold = await asyncio.gather(*(one(i, "cold") for i in range(len(PROMPTS))))
    warm = await asyncio.gather(*(one(i, "warm") for i in range(len(PROMPTS))))
    assert all(map(tiny.agrees, PROMPTS, [tokens for tokens, _ in cold]))
    assert all(map(tiny.agrees, PROMPTS, [tokens for tokens, _ in warm]))
    assert [cached for _, cached in warm] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]

    before = engine.health().progress

    # Layers beat the heart: every layer of every chunk, on top of the loop's passes.
    steps = (await engine.stats()).steps_total
    stream = engine.generate(request("a", list(range(40)), 1))
    whole = merge_chunks([chunk async for chunk in stream])
    assert whole.finish is FinishReason.LENGTH
    chunks = (await engine.stats()).steps_total - steps
    assert chunks >= 3  # 40 tokens in chunks of 16
    assert engine.health().progress - before >= 3 * chunks
    await engine.close()


def test_offline_llm_says_the_same(tiny: Tiny) -> None:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
    with LLM(str(tiny.folder), dtype="fp32", num_pages=512, page_size=4, threads=1) as llm:
        found = llm.generate(PROMPTS, sampling)
    assert all(map(tiny.agrees, PROMPTS, [one.token_ids for one in found]))
    assert all(len(one.logprobs) == NUM_TOKENS for one in found)


def test_more_kv_memory_than_there_is_is_refused(tiny: Tiny) -> None:
    """Pages are backed lazily: without the check the process would die in the middle of work."""
    with pytest.raises(ConfigError, match=r"available; lower --num-pages"):
        LLM(str(tiny.folder), kv_memory="100000GB", threads=1)


def copy_of(folder: Path, target: Path) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_truncated_weights_are_one_line_from_the_engine_process(tiny: Tiny, tmp_path: Path) -> None:
    file = copy_of(tiny.folder, tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="safetensors") as caught:
        AsyncEngine.launch(tiny_config(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "complaint"), [("{", "{{", "config.json"), ('"llama"', '"mamba9"', "mamba9")]
)
def test_unusable_config_is_refused_before_a_process_is_started(
    tiny: Tiny, tmp_path: Path, old: str, new: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copy_of(tiny.folder, tmp_path) / "config.json"
    file.write_text(file.read_text().replace(old, new))
    monkeypatch.setattr("phloem.engine.async_engine.EngineProcess", None)
    for refuse in (lambda: AsyncEngine.launch(tiny_config(tmp_path)), lambda: LLM(str(tmp_path))):
        with pytest.raises(ConfigError, match=complaint) as caught:
            refuse()
        assert "\n" not in str(caught.value)
