"""Ranks as processes under the whole engine: answers, tiers, ends of all kinds."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from phloem.config import CacheOptions, Config, ModelOptions, ParallelOptions, RuntimeOptions
from phloem.core.errors import ConfigError, EngineDead
from phloem.core.request import SamplingParams
from phloem.engine import LLM, AsyncEngine, startup_rows
from phloem.engine.api import TextChunk
from phloem.engine.commands import ListRemote, UpdateWeights, VerifyCache
from tests.engine.fakes import byte_tokenizer
from tests.engine.test_processes import answer, ask, until
from tests.models.checkpoints import make_checkpoint, make_latent
from tests.parity.test_journeys import words

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_checkpoint("llama", folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def open_llm(model: Path, cp: int, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "fp32",
        "page_size": 4,
        "num_pages": 60,
        "max_model_len": 128,
        "max_prefill_tokens": 24,
        "prefetch_policy": "wait_complete",
        "threads": 1,
    }
    return LLM(str(model), **{**defaults, "cp": cp, **settings})


def ids(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(prompts, GREEDY)]


PROMPTS = [words(seed, 9 + 7 * seed) for seed in range(1, 9)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    with open_llm(model, 1, prefix_cache=False) as llm:
        return [ids(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[LLM]:
    """Two ranks, the host tier on one of them: most tests share it."""
    with open_llm(model, 2, host_memory="1MB") as llm:
        yield llm


def test_ranks_with_copies_of_all_pages_answer_alike(
    model: Path, expected: list[tuple[int, ...]]
) -> None:
    """Red if a page is computed by nobody, or if what is shown counts the copies."""
    with open_llm(model, 2, placement="replicate", host_memory="0") as llm:
        rows = dict(startup_rows(llm._core.facts))
        assert (rows["pages"], rows["token capacity"]) == ("120", "240")
        assert ids(llm, PROMPTS) == expected
        assert ids(llm, PROMPTS) == expected  # from the device
    with pytest.raises(ConfigError, match="no host tier"):
        open_llm(model, 2, placement="replicate", host_memory="1MB")


@pytest.mark.parametrize("remote_kv", ["gather_kv", "send_q"])
def test_processes_whose_pages_or_queries_travel_answer_alike(
    model: Path, expected: list[tuple[int, ...]], remote_kv: str
) -> None:
    """With loads from the host as well: a layer is sent when it is there. And with replicas of
    what is read often, which are the default here."""
    verify = remote_kv == "send_q"  # in a group whose other messages are compared as well
    settings = {"remote_kv": remote_kv, "verify_collectives": verify, "host_memory": "1MB"}
    with open_llm(model, 2, **settings) as llm:
        assert ids(llm, PROMPTS) == expected
        assert ids(llm, PROMPTS) == expected
        replicas = llm._core.stats().cache.replicas
        assert replicas.made_pages_total > 0
        assert replicas.served_pages_total > 0
        assert ask_until_loaded(llm, expected)
    with pytest.raises(ConfigError, match="every page"):
        open_llm(model, 2, remote_kv=remote_kv, placement="replicate", host_memory="0")


@pytest.mark.parametrize("remote_kv", ["gather_kv", pytest.param("send_q", marks=pytest.mark.long)])
def test_without_replicas_all_that_is_read_travels(
    model: Path, expected: list[tuple[int, ...]], remote_kv: str
) -> None:
    with open_llm(model, 2, remote_kv=remote_kv, host_memory="0", hot_replicas="0") as llm:
        assert ids(llm, PROMPTS) == expected
        assert llm._core.stats().cache.replicas is None


def ask_until_loaded(llm: LLM, expected: list[tuple[int, ...]]) -> bool:
    """Ask, with the devices full of other prompts, until something was loaded from the host: on a
    busy machine the cost model may find at first that computing is faster."""
    for turn in range(8):
        for seed in range(20, 32):
            ids(llm, [words(100 * turn + seed, 80)])
        back = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        assert [one.token_ids for one in back] == expected
        if any(one.cached.host for one in back):
            return True
    return False


def rank_pids(parent: int) -> list[int]:
    """The rank processes below a process."""
    out = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat[1]) == parent and b"rank_process" in line and stat[0] != "Z":
            out.append(int(entry.name))
    return out


def test_answers_are_those_of_one_rank(pair: LLM, expected: list[tuple[int, ...]]) -> None:
    """All at once in chunks, then each from cached pages of both ranks."""
    assert ids(pair, PROMPTS) == expected
    again = [pair.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [one.token_ids for one in again] == expected
    assert all(one.cached.device > 0 for one in again)
    assert pair.operate(VerifyCache()) == {"ok": True}
    assert rank_pids(os.getpid())


def test_pools_that_are_mapped_are_read_in_place_by_what_was_measured(pair: LLM) -> None:
    """No setting says so: the figures do, in every step, and the operator can see them."""
    rows = dict(startup_rows(pair._core.facts))
    assert rows["remote KV"].startswith("auto: link ")
    ids(pair, [words(9, 30)])
    stats = pair.stats()
    assert stats.remote is not None
    assert stats.remote.steps_total == (("direct", "direct", stats.steps_total),)
    told = pair.operate(ListRemote(3))
    assert told["rates"]["read_bytes_s"] > 0
    assert [each["step"] for each in told["decisions"]] == [
        stats.steps_total - back for back in (1, 2, 3)
    ]
    assert len(told["decisions"][0]["ways"]) == 9


def test_pages_of_all_ranks_come_back_from_the_host(
    pair: LLM, expected: list[tuple[int, ...]]
) -> None:
    """More than the devices hold: what was evicted from either rank comes from the host."""
    assert pair.card.num_pages == 120
    assert ask_until_loaded(pair, expected)


STORED = {"storage_size": "32MB", "host_memory": "1MB"}


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that two ranks have written."""
    folder = tmp_path_factory.mktemp("stored")
    with open_llm(model, 2, storage=str(folder), **STORED) as llm:
        ids(llm, PROMPTS)
    return folder


@pytest.mark.parametrize(
    "readers", [1, 3, *(pytest.param(count, marks=pytest.mark.long) for count in (2, 4))]
)
def test_a_directory_written_by_two_ranks_is_read_by_any_number(
    model: Path, stored: Path, tmp_path: Path, expected: list[tuple[int, ...]], readers: int
) -> None:
    """O-25: what is stored names no rank, because it is the same whoever computed it."""
    own = shutil.copytree(stored, tmp_path / "own")
    with open_llm(model, readers, storage=str(own), **STORED) as llm:
        found = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [one.token_ids for one in found] == expected
    whole = [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
    assert [one.cached.storage for one in found] == whole


def test_weights_are_updated_on_all_ranks(
    model: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:
    """Other weights, and those of before; what one rank cannot read changes nothing."""
    other = tmp_path / "other"
    make_checkpoint("llama", other, seed=1)
    byte_tokenizer().save(str(other / "tokenizer.json"))
    with open_llm(other, 1, prefix_cache=False) as llm:
        others = [ids(llm, [prompt])[0] for prompt in PROMPTS]
    assert others != expected
    with open_llm(model, 2) as llm:
        assert ids(llm, PROMPTS) == expected
        llm.operate(UpdateWeights(str(other)))
        assert ids(llm, PROMPTS) == others
        weights = other / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        with pytest.raises(ConfigError):
            llm.operate(UpdateWeights(str(other)))
        llm.operate(UpdateWeights(str(model)))
        assert ids(llm, PROMPTS) == expected


def test_weights_of_latents_are_updated_where_queries_travel(tmp_path: Path) -> None:
    """Attention over latents holds weights itself: red if the way of a step keeps the old ones."""
    folders, answers, prompts = [tmp_path / "one", tmp_path / "two"], [], PROMPTS[:3]
    for seed, folder in enumerate(folders):
        make_latent("v3-yarn", folder, seed=seed)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        with open_llm(folder, 1, prefix_cache=False) as llm:
            answers.append([ids(llm, [prompt])[0] for prompt in prompts])
    assert answers[0] != answers[1]
    with open_llm(folders[0], 2, remote_kv="send_q") as llm:
        assert ids(llm, prompts) == answers[0]
        llm.operate(UpdateWeights(str(folders[1])))
        assert ids(llm, prompts) == answers[1]


def test_a_rank_that_cannot_load_says_why(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    make_checkpoint("llama", broken)
    byte_tokenizer().save(str(broken / "tokenizer.json"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = set(rank_pids(os.getpid()))
    with pytest.raises(ConfigError):
        open_llm(broken, 2)
    assert set(rank_pids(os.getpid())) == before


def test_a_killed_rank_is_an_error_that_names_it(model: Path) -> None:
    """While nothing runs: the next request learns it. All others end."""
    before = set(rank_pids(os.getpid()))
    with open_llm(model, 3) as llm:
        one, _ = set(rank_pids(os.getpid())) - before
        os.kill(one, signal.SIGKILL)
        killed = r"rank (1|2) failed: its process was killed by SIGKILL"
        with pytest.raises(EngineDead, match=killed):
            llm.generate(PROMPTS[0], GREEDY)
    assert set(rank_pids(os.getpid())) == before


def test_a_rank_that_hangs_does_not_outlive_its_leader(model: Path) -> None:
    """Stopped, it neither answers nor ends: closing takes its life after a moment."""
    before = set(rank_pids(os.getpid()))
    llm = open_llm(model, 2)
    (rank,) = set(rank_pids(os.getpid())) - before
    os.kill(rank, signal.SIGSTOP)
    llm.close()
    assert set(rank_pids(os.getpid())) == before


def config(model: Path) -> Config:
    return Config(
        model=ModelOptions(model=str(model), dtype="fp32"),
        cache=CacheOptions(num_pages=256, page_size=4),
        parallel=ParallelOptions(cp=2),
        runtime=RuntimeOptions(threads=1),
    )


async def test_an_engine_whose_rank_is_killed_while_idle_ends_soon(model: Path) -> None:
    engine = AsyncEngine.launch(config(model))
    assert (await answer(engine, ask("a", max_tokens=5, ignore_eos=True))).completion_tokens == 5
    (rank,) = rank_pids(engine.pid)
    before_s = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    await until(lambda: engine.health().ended)
    assert time.monotonic() - before_s < 5.0
    with pytest.raises(EngineDead, match="rank 1 failed: its process was killed by SIGKILL"):
        await answer(engine, ask("b"))
    await engine.close()


async def last_words(stream: AsyncIterator[TextChunk]) -> str:
    """The error that ends an answer, however it comes."""
    try:
        return next(error for error in [chunk.error async for chunk in stream] if error)
    except EngineDead as death:
        return str(death)


async def test_a_rank_killed_in_the_middle_of_an_answer_ends_it(model: Path) -> None:
    engine = AsyncEngine.launch(config(model))
    (rank,) = rank_pids(engine.pid)
    stream = engine.generate(ask("a", max_tokens=400, ignore_eos=True))
    await anext(stream)
    os.kill(rank, signal.SIGKILL)
    assert "rank 1" in await last_words(stream)
    await until(lambda: engine.health().ended)
    await engine.close()


def test_ranks_end_when_their_leader_is_killed(model: Path) -> None:
    """kill -9 of the process that started them: red if a rank outlives it by 5 s."""
    program = (
        "import sys; from tests.engine.test_ranks import open_llm; from pathlib import Path\n"
        "llm = open_llm(Path(sys.argv[1]), 2); print('ready', flush=True); sys.stdin.read()"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", program, str(model)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert leader.stdout is not None
    assert leader.stdout.readline() == "ready\n"
    (rank,) = rank_pids(leader.pid)
    fd = os.pidfd_open(rank)
    leader.kill()
    leader.communicate()
    ended = wait_for_end(fd, 5.0)
    os.close(fd)
    assert ended


def wait_for_end(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))
