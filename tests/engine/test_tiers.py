"""Tiers in the whole engine: restart, storage that comes and goes, weights that change, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from phloem.core.errors import ConfigError
from phloem.core.request import SamplingParams
from phloem.engine import LLM
from phloem.engine.commands import (
    AttachStorage,
    ClearCache,
    CommandReply,
    DetachStorage,
    ListCache,
    UpdateWeights,
    VerifyCache,
)
from phloem.stores.adapters.segment.inspect import DirectoryView
from tests.engine.fakes import byte_tokenizer
from tests.models.checkpoints import make_checkpoint
from tests.parity.test_journeys import words

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SIZE = 32 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one architecture, other weights."""
    folder = tmp_path_factory.mktemp("models")
    paths = [folder / "a", folder / "b"]
    for seed, path in enumerate(paths):
        make_checkpoint("llama", path, seed=seed)
        byte_tokenizer().save(str(path / "tokenizer.json"))
    return paths


def open_llm(model: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "fp32",
        "page_size": 4,
        "num_pages": 60,
        "max_model_len": 128,
        "prefetch_policy": "wait_complete",  # computing is sooner with a model of this size
    }
    return LLM(str(model), **{**defaults, "host_memory": "1MB", "threads": 1, **settings})


def ids(llm: LLM, prompt: list[int]) -> tuple[int, ...]:
    return llm.generate(prompt, GREEDY)[0].token_ids


def cold(model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with open_llm(model, host_memory="0", prefix_cache=False) as llm:
        return [ids(llm, prompt) for prompt in prompts]


def test_a_new_engine_finds_what_the_last_one_computed(models: list[Path], tmp_path: Path) -> None:
    prompt = words(1, 41)
    settings = {"storage": str(tmp_path), "storage_size": "32MB"}
    with open_llm(models[0], **settings) as llm:
        first = llm.generate(prompt, GREEDY)[0]
    with open_llm(models[0], **settings) as llm:
        second = llm.generate(prompt, GREEDY)[0]
        stats = llm.stats()
    assert first.cached.total == 0
    assert second.cached.storage == 40
    assert second.token_ids == first.token_ids
    assert stats.cached_tokens_total.storage == 40


def test_storage_is_attached_and_detached_between_requests(
    models: list[Path], tmp_path: Path
) -> None:
    prompt = words(2, 41)
    with open_llm(models[0]) as llm:
        ids(llm, prompt)
        answer = llm.operate(AttachStorage(str(tmp_path / "kept"), SIZE))
        assert answer["objects"] == 0
        with pytest.raises(ConfigError, match="attached already"):
            llm.operate(AttachStorage(str(tmp_path / "other"), SIZE))
        ids(llm, words(3, 41))
        assert llm.operate(DetachStorage())["detached"]
        assert not llm.operate(DetachStorage())["detached"]
        with pytest.raises(ConfigError, match="cannot use storage directory"):
            llm.operate(AttachStorage("/proc/nothing", SIZE))
        assert llm.operate(VerifyCache()) == {"ok": True}
    view = DirectoryView(str(tmp_path / "kept"))
    assert view.verify().good
    view.close()


def test_without_a_host_tier_there_is_nothing_to_attach_to(
    models: list[Path], tmp_path: Path
) -> None:
    with (
        open_llm(models[0], host_memory="0") as llm,
        pytest.raises(ConfigError, match="--host-memory"),
    ):
        llm.operate(AttachStorage(str(tmp_path), SIZE))


def test_attach_detach_and_clear_under_load(models: list[Path], tmp_path: Path) -> None:
    """Requests go on while the directory comes and goes; every answer is cold's."""
    prompts = [words(10 + i % 5, 30 + 7 * (i % 5)) for i in range(30)]
    expected = cold(models[0], prompts)
    with open_llm(models[0]) as llm:
        core = llm._live()
        replies: list[CommandReply] = []
        script = [
            AttachStorage(str(tmp_path / "one"), SIZE),
            DetachStorage(),
            AttachStorage(str(tmp_path / "two"), SIZE),
            ClearCache(storage=True),
            ClearCache(storage=False),
            DetachStorage(),
        ]
        step = core.step
        passes = 0

        def stepping() -> bool:
            nonlocal passes
            passes += 1
            if passes % 7 == 0 and script and len(replies) == 6 - len(script):
                core.command(script.pop(0), replies.append)
            return step()

        llm._core = _Stepping(core, stepping)
        answers = [done.token_ids for done in llm.generate(prompts, GREEDY)]
        llm._core = core
        while script:
            answer = core.command(script.pop(0), replies.append)
            while len(replies) < 6 - len(script):
                core.step()
        assert answer is None
        assert [reply.error for reply in replies] == [None] * 6
        assert answers == expected
        assert llm.operate(VerifyCache()) == {"ok": True}


class _Stepping:
    """A core whose passes are watched."""

    def __init__(self, core: Any, step: Any) -> None:
        self._core, self.step = core, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def test_o17_after_an_update_nothing_of_the_old_weights_is_read(
    models: list[Path], tmp_path: Path
) -> None:
    """Device, host and storage are full of the old weights' pages, and one request runs over the
    update: it is answered by the old weights, all later ones by the new."""
    old, new = models
    prompts = [words(20 + i, 33 + i) for i in range(4)]
    of_old, of_new = cold(old, prompts), cold(new, prompts)
    assert of_old != of_new
    settings = {"storage": str(tmp_path), "storage_size": "32MB", "num_pages": 40}
    with open_llm(old, **settings) as llm:
        assert [ids(llm, p) for p in prompts] == of_old
        core, replies = llm._live(), []
        step, passes = core.step, 0

        def stepping() -> bool:
            nonlocal passes
            passes += 1
            if passes == 3:
                core.command(UpdateWeights(str(new)), replies.append)
            return step()

        llm._core = _Stepping(core, stepping)
        assert ids(llm, prompts[0]) == of_old[0]
        llm._core = core
        while not replies:
            core.step()
        assert replies[0].error is None
        assert replies[0].result["generation"] == 1
        answers = llm.generate(prompts, GREEDY)
        assert [a.token_ids for a in answers] == of_new
        assert [a.cached.total for a in answers] == [0] * 4
        assert [a.token_ids for a in llm.generate(prompts, GREEDY)] == of_new
        assert llm.operate(VerifyCache()) == {"ok": True}
    with open_llm(new, **settings) as llm:  # what was stored since bears the new identity
        done = llm.generate(prompts[0], GREEDY)[0]
        assert (done.token_ids, done.cached.storage) == (of_new[0], 32)
    with open_llm(old, **settings) as llm:
        done = llm.generate(prompts[0], GREEDY)[0]
        assert (done.token_ids, done.cached.storage) == (of_old[0], 32)


def test_requests_that_come_during_an_update_wait_for_the_new_weights(models: list[Path]) -> None:
    old, new = models
    prompt = words(30, 40)
    (expected,) = cold(new, [prompt])
    with open_llm(old) as llm:
        ids(llm, words(31, 20))
        core, replies = llm._live(), []
        core.command(UpdateWeights(str(new)), replies.append)
        while not core.operator.wants_idle:
            core.step()
        assert ids(llm, prompt) == expected
        assert replies[0].error is None


def test_weights_of_another_architecture_are_refused(models: list[Path], tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "qwen3")
    with open_llm(models[0]) as llm:
        before = ids(llm, words(32, 20))
        for path in (tmp_path / "qwen3", tmp_path / "absent"):
            with pytest.raises(ConfigError):
                llm.operate(UpdateWeights(str(path)))
        assert ids(llm, words(32, 20)) == before


def test_a_listing_names_the_largest_prefixes_first(models: list[Path]) -> None:
    with open_llm(models[0]) as llm:
        for length in (9, 41, 21):
            ids(llm, words(length, length))
        listed = llm.operate(ListCache(2))
    assert listed["of"] == 3
    assert [row["device_pages"] for row in listed["prefixes"]] == [11, 6]
    assert listed["prefixes"][0]["head"] == words(41, 41)[:32]


_LIVES = """
import os, random, sys
import phloem.engine.build  # all that an engine needs, once for all lives
from phloem.core.request import SamplingParams
from phloem.engine import LLM
def words(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(2, 320) for _ in range(count)]
model, directory, policy = sys.argv[1:]
greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
def live():
    with LLM(model, dtype="fp32", page_size=4, num_pages=60, max_model_len=128, threads=1,
             host_memory="1MB", storage=directory, storage_size="4MB", write_policy=policy) as llm:
        print(os.getpid(), flush=True)
        for i in range(10**6):
            llm.generate([words(1000 + i % 37, 40), words(1000 + i % 23, 60)], greedy)
            print(i, flush=True)
for _ in sys.stdin:
    child = os.fork()
    if not child:
        try:
            live()
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    print("over", flush=True)
"""


class Lives:
    """Engines one after another, each in a fork of one process, and killed."""

    def __init__(self, model: Path, directory: Path, policy: str) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _LIVES, str(model), str(directory), policy],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=str(Path(__file__).resolve().parents[2]),
            start_new_session=True,
        )
        self._watchdog = threading.Timer(100.0, os.killpg, (self._parent.pid, signal.SIGKILL))
        self._watchdog.start()

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._parent.communicate()

    def kill_one(self, after: int) -> None:
        """Start an engine; kill it when it has answered so many times."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write("\n")
        lines = iter(self._parent.stdout.readline, "")
        child = next(lines, "over\n")
        assert child != "over\n", "the engine did not begin"
        for _ in range(after):
            assert next(lines, "over\n") != "over\n", "the engine ended by itself"
        os.kill(int(child), signal.SIGKILL)
        assert "over\n" in lines


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_an_engine_killed_at_random_leaves_no_wrong_page(
    models: list[Path], tmp_path: Path, policy: str
) -> None:
    """Killed (-9) five times at other moments of its work on one directory: afterwards every
    object is as it was put, the bound holds, and what is found there gives cold's answers."""
    with Lives(models[0], tmp_path, policy) as lives:
        for kill_after in (1, 2, 5, 9, 14):
            lives.kill_one(kill_after)
            view = DirectoryView(str(tmp_path))
            report = view.verify()
            assert report.good, report
            assert view.used_bytes <= 4 << 20
            view.close()
    prompts = [words(1000 + i, 40) for i in range(5)]
    with open_llm(models[0], storage=str(tmp_path), storage_size="4MB") as llm:
        answers = llm.generate(prompts, GREEDY)
        assert sum(a.cached.storage for a in answers) > 0
        assert [a.token_ids for a in answers] == cold(models[0], prompts)
