"""The offline LLM over the real loop and a fake worker."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phloem.core.errors import BadRequest, ConfigError, EngineDead
from phloem.core.request import SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.engine.llm import LLM, config_from_settings
from phloem.sim import cold
from tests.engine.fakes import RAISE, build_fake, say, script, write_model


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    model = str(write_model(tmp_path / "fake"))
    with LLM(model, builder=build_fake, num_pages=256, page_size=4, max_running=8) as llm:
        yield llm
        stats = llm.stats()
        assert stats.running == stats.queued == stats.cache.locked_pages == 0


def expected(prompt: list[int], sampling: SamplingParams) -> tuple[int, ...]:
    return tuple(cold(say, tokens_to_bytes(prompt), sampling))


def test_one_prompt_or_many_text_or_ids(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=9)
    want = expected(list(b"hello"), sampling)
    (alone,) = llm.generate("hello", sampling)
    (ids,) = llm.generate(list(b"hello"), sampling)
    both = llm.generate(["hello", list(b"hello")], sampling)
    assert {one.token_ids for one in (alone, ids, *both)} == {want}
    assert alone.text == bytes(want).decode()
    assert (alone.finish_reason, alone.prompt_tokens, alone.cached_tokens) == ("length", 5, 0)
    assert ids.cached_tokens == 4
    assert llm.generate([]) == []


def test_many_prompts_come_in_order_and_right(llm: LLM) -> None:
    """More prompts than rows, ends at different times."""
    rng = random.Random(1)
    prompts = [[rng.randrange(97, 100) for _ in range(rng.randint(1, 60))] for _ in range(60)]
    samplings = [SamplingParams(max_tokens=rng.randint(1, 20)) for _ in prompts]
    found = llm.generate(prompts, samplings)
    for prompt, sampling, one in zip(prompts, samplings, found, strict=True):
        assert one.token_ids == expected(prompt, sampling)
        assert one.prompt_tokens == len(prompt)


def test_chat_applies_the_template_and_finds_the_earlier_turn(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12)
    turns = [{"role": "user", "content": "hi there"}]
    (first,) = llm.chat(turns, sampling)
    assert first.token_ids == expected(list(b"[user]hi there\n[assistant]"), sampling)
    turns += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "more"},
    ]
    (second,) = llm.chat(turns, sampling)
    assert second.cached_tokens >= 24
    assert len(llm.chat([turns, turns], sampling)) == 2


def test_stop_strings_and_stop_ids(llm: LLM) -> None:
    prompt = script(b"one two three four")
    (one,) = llm.generate(prompt, SamplingParams(max_tokens=50, stop=("thr",)))
    assert (one.text, one.finish_reason, one.stop_reason) == ("one two ", "stop", "thr")
    (two,) = llm.generate(prompt, SamplingParams(max_tokens=50, stop_token_ids=(ord("f"),)))
    assert (two.text, two.stop_reason) == ("one two three ", ord("f"))
    (three,) = llm.generate(prompt, SamplingParams(max_tokens=50))
    assert (three.text, three.finish_reason, three.stop_reason) == (
        "one two three four",
        "stop",
        None,
    )


def test_one_bad_prompt_refuses_the_call_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().steps_total
    bad = [
        (["fine", ""], None),
        ([[1, 2], [300]], None),
        (["fine"], [SamplingParams(), SamplingParams()]),
        ([[1] * 600], None),
        ([[1, "x"]], None),
        (["\ud800"], None),
    ]
    for prompts, sampling in bad:
        with pytest.raises(BadRequest):
            llm.generate(prompts, sampling)
    assert llm.stats().steps_total == before


def test_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a step: the next call works, and its pages are all there."""
    steps = iter(range(5))
    step = type(llm._core).step

    def interrupted(core: object) -> bool:
        if next(steps, None) == 4:
            raise KeyboardInterrupt
        return step(core)

    monkeypatch.setattr(type(llm._core), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SamplingParams(max_tokens=100))
    assert llm.stats().cache.locked_pages == 0
    sampling = SamplingParams(max_tokens=5)
    assert llm.generate("abc", sampling)[0].token_ids == expected(list(b"abc"), sampling)


def test_broken_worker_is_engine_dead(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), builder=build_fake, num_pages=16, page_size=4)
    with llm, pytest.raises(EngineDead, match="the fake worker broke"):
        llm.generate([[RAISE]])


def test_closed_llm_says_so(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), builder=build_fake, num_pages=16, page_size=4)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("x")


def test_settings_go_to_their_groups_and_unknown_ones_are_named() -> None:
    config = config_from_settings("m", {"dtype": "fp32", "num_pages": 7, "max_running": 3})
    assert (config.model.model, config.model.dtype) == ("m", "fp32")
    assert (config.cache.num_pages, config.scheduler.max_running) == (7, 3)
    with pytest.raises(ConfigError, match="did you mean 'num_pages'"):
        config_from_settings("m", {"num_page": 7})


def test_importing_phloem_and_its_front_brings_no_torch() -> None:
    code = (
        "import sys, phloem; assert 'numpy' not in sys.modules; "
        "import phloem.engine; phloem.LLM; phloem.SamplingParams; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
