"""The engine process: a real child with the real loop over a fake worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from phloem.core.errors import BadRequest, ConfigError, EngineDead, Overloaded
from phloem.core.request import FinishReason, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.engine import AsyncEngine
from phloem.engine.api import TextChunk, TextRequest
from phloem.engine.assembly import merge_chunks
from phloem.engine.process import EngineProcess
from phloem.sim import cold
from tests.engine.fakes import (
    BROKEN_BUILDER,
    BUILDER,
    CRASH,
    EOS,
    HANG,
    RAISE,
    fake_config,
    say,
    script,
    write_model,
)


def ask(name: str, prompt: Sequence[int] = b"hello world", **sampling: object) -> TextRequest:
    """A request; a prompt's bytes are its token ids."""
    return TextRequest(
        request_id=name,
        tokens=tokens_to_bytes(list(prompt)),
        sampling=SamplingParams(**{"max_tokens": 20, **sampling}),
    )


async def answer(engine: AsyncEngine, request: TextRequest) -> TextChunk:
    return merge_chunks([chunk async for chunk in engine.generate(request)])


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    """Yield to the loop until it holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


async def assert_pool_exact(engine: AsyncEngine) -> None:
    """Nothing runs, nothing is locked, every page is accounted for."""
    async with asyncio.timeout(5):
        while True:
            stats = await engine.stats()
            if stats.running == stats.queued == 0:
                break
    cache = stats.cache
    assert cache.locked_pages == 0
    assert cache.free_pages + cache.evictable_pages == cache.total_pages
    assert await engine.flush_cache() == 0
    assert (await engine.stats()).cache.free_pages == cache.total_pages


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "fake")


@pytest_asyncio.fixture
async def engine(model: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.launch(fake_config(model), builder=BUILDER)
    yield engine
    async with asyncio.timeout(5):
        await engine.close()
    assert engine.health().alive is False
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


async def test_answers_as_the_model_alone_would(engine: AsyncEngine) -> None:
    request = ask("a", b"some prompt")
    whole = await answer(engine, request)
    assert list(whole.tokens) == cold(say, request.tokens, request.sampling)
    assert bytes(whole.tokens).decode() == whole.text
    assert (whole.finish, whole.prompt_tokens, whole.completion_tokens) == (
        FinishReason.LENGTH,
        11,
        20,
    )
    again = await answer(engine, ask("a", b"some prompt"))  # an id may come back after its end
    assert again.tokens == whole.tokens
    assert again.cached.device == 8  # two whole pages of four


async def test_o35_200_parallel_requests_with_random_aborts(engine: AsyncEngine) -> None:
    """Half of them leave at random points; all others are right, and the pool is exact."""

    async def one(index: int) -> bool:
        request = ask(f"r{index}", b"shared prefix, then %d" % (index % 40), max_tokens=30)
        leaves_at = (index * 7919) % 25 if index % 2 else None
        got: list[int] = []
        stream = engine.generate(request)
        async with contextlib.aclosing(stream):
            async for chunk in stream:
                got += chunk.tokens
                if leaves_at is not None and len(got) >= leaves_at:
                    return False
        assert got == cold(say, request.tokens, request.sampling)
        return True

    assert sum(await asyncio.gather(*(one(i) for i in range(200)))) >= 100
    await assert_pool_exact(engine)


async def test_o35a_streaming_client_leaves_after_the_first_chunk(engine: AsyncEngine) -> None:
    stream = engine.generate(ask("long", max_tokens=480))
    await anext(stream)
    before_s = time.monotonic()
    await stream.aclose()
    await assert_pool_exact(engine)
    assert time.monotonic() - before_s < 1.0
    assert (await answer(engine, ask("next"))).finish is FinishReason.LENGTH


@pytest.mark.parametrize("after_steps", [0, 1, 5])
async def test_o35b_waiting_client_is_cancelled(engine: AsyncEngine, after_steps: int) -> None:
    """In the queue, in prefill, in decode: cancellation reaches the engine."""
    start = (await engine.stats()).steps_total
    task = asyncio.create_task(answer(engine, ask("gone", max_tokens=480)))
    await until(lambda: engine._by_engine_id)
    while (await engine.stats()).steps_total < start + after_steps:
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_pool_exact(engine)
    assert (await answer(engine, ask("gone"))).finish is FinishReason.LENGTH


async def test_o35d_no_abort_is_sent_for_a_request_that_has_finished(engine: AsyncEngine) -> None:
    aborts = []
    stream = engine.generate(ask("a", max_tokens=3))
    await anext(stream)
    send = engine._channel.send
    engine._channel.send = lambda message: (aborts.append(message), send(message))
    await until(lambda: not engine._by_engine_id)  # its last chunk has come, nobody has read it
    await stream.aclose()
    assert aborts == []
    assert dict((await engine.stats()).finished_total)["abort"] == 0


async def test_o36a_stop_string_ends_the_request_at_the_engine_too(engine: AsyncEngine) -> None:
    whole = await answer(
        engine, ask("s", script(b"Hi DEFGH" + b"x" * 200), max_tokens=250, stop=("DEFG",))
    )
    assert (whole.text, whole.finish, whole.stop_reason) == ("Hi ", FinishReason.STOP, "DEFG")
    await assert_pool_exact(engine)
    assert dict((await engine.stats()).finished_total)["abort"] == 1


async def test_o36a_stop_is_not_matched_across_the_prompts_border(engine: AsyncEngine) -> None:
    """The scripted prompt ends in the very bytes that would complete the stop."""
    whole = await answer(engine, ask("s", script(b"FG!DE"), max_tokens=50, stop=("DEFG",)))
    assert (whole.text, whole.finish) == ("FG!DE", FinishReason.STOP)
    assert whole.stop_reason is None  # EOS


async def test_o36b_multibyte_characters_through_the_engine(engine: AsyncEngine) -> None:
    text = "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{GRINNING FACE} e\u0301"
    chunks = [c async for c in engine.generate(ask("u", script(text.encode()), max_tokens=99))]
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert chunks[-1].tokens[-1:] in ((EOS,), ())


async def test_slow_reader_gets_everything_in_fewer_chunks(engine: AsyncEngine) -> None:
    request = ask("slow", max_tokens=100)
    stream = engine.generate(request)
    chunks = [await anext(stream)]
    await until(lambda: not engine._by_engine_id)
    chunks += [chunk async for chunk in stream]
    assert len(chunks) == 2
    assert list(merge_chunks(chunks).tokens) == cold(say, request.tokens, request.sampling)


async def test_bad_requests_are_refused_and_others_go_on(engine: AsyncEngine) -> None:
    bad = [
        ask("empty", b""),
        ask("huge id", [300]),
        ask("negative id", [-1]),
        ask("too long", [1] * 512),
        ask("too much", [1] * 500, max_tokens=13),
        ask("bias", logit_bias=((300, 1.0),)),
        ask("stop id", stop_token_ids=(300,)),
        ask("surrogate", stop=("\ud800",)),
    ]
    other = asyncio.create_task(answer(engine, ask("other", max_tokens=200)))
    for request in bad:
        with pytest.raises(BadRequest):
            await answer(engine, request)
    with pytest.raises(BadRequest) as caught:
        await answer(engine, bad[3])
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    assert (await other).completion_tokens == 200


async def test_o36e_context_filled_exactly(engine: AsyncEngine) -> None:
    whole = await answer(engine, ask("full", [65] * 500, max_tokens=12))
    assert (whole.finish, whole.completion_tokens) == (FinishReason.LENGTH, 12)


async def test_a_running_id_cannot_be_used_twice(engine: AsyncEngine) -> None:
    stream = engine.generate(ask("twin", max_tokens=400))
    await anext(stream)
    with pytest.raises(BadRequest, match="twin"):
        await answer(engine, ask("twin"))
    await stream.aclose()
    assert (await answer(engine, ask("twin"))).finish is FinishReason.LENGTH


async def test_cache_salt_separates_tenants(engine: AsyncEngine) -> None:
    one = ask("1", b"a prompt of many pages")
    await answer(engine, one)
    salted = TextRequest(
        request_id="2", tokens=one.tokens, sampling=one.sampling, cache_salt="mine"
    )
    whole = await answer(engine, salted)
    assert whole.cached.total == 0
    assert list(whole.tokens) == cold(say, one.tokens, one.sampling)


async def test_queue_limit(model: Path) -> None:
    """Three that never end fill it; one leaves, and there is room for one more."""
    engine = AsyncEngine.launch(fake_config(model, max_running=1, max_queued=2), builder=BUILDER)
    engine.exit_grace_s = 0.1
    tasks = [asyncio.create_task(answer(engine, ask(f"{i}", [HANG]))) for i in range(3)]
    await until(lambda: len(engine._by_engine_id) == 3)
    with pytest.raises(Overloaded):
        await answer(engine, ask("one too many"))
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    tasks.append(asyncio.create_task(answer(engine, ask("fits now", [HANG]))))
    await until(lambda: len(engine._by_engine_id) == 3)
    await engine.close()
    assert {(await task).finish for task in tasks[1:]} == {FinishReason.ABORT}


async def test_killed_child_ends_every_waiting_request_at_once(model: Path) -> None:
    engine = AsyncEngine.launch(fake_config(model), builder=BUILDER)
    waiting = [asyncio.create_task(answer(engine, ask(f"{i}", [HANG]))) for i in range(20)]
    await until(lambda: len(engine._by_engine_id) == 20)
    stats = asyncio.create_task(engine.flush_cache())
    await asyncio.sleep(0)
    killed_s = time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)
    results = await asyncio.gather(*waiting, stats, return_exceptions=True)
    assert time.monotonic() - killed_s < 2.0
    assert all(isinstance(result, EngineDead) and "SIGKILL" in str(result) for result in results)
    assert not engine.health().alive
    with pytest.raises(EngineDead):
        await answer(engine, ask("later"))
    await engine.close()


async def test_child_that_kills_itself_in_a_step(model: Path) -> None:
    engine = AsyncEngine.launch(fake_config(model), builder=BUILDER)
    with pytest.raises(EngineDead):
        await answer(engine, ask("crash", [CRASH]))
    await engine.close()


async def test_failing_worker_ends_requests_with_an_error_and_then_the_process(
    model: Path,
) -> None:
    engine = AsyncEngine.launch(fake_config(model), builder=BUILDER)
    whole = await answer(engine, ask("raise", [RAISE]))
    assert whole.finish is FinishReason.ERROR
    assert "the fake worker broke" in (whole.error or "")
    await until(lambda: engine._death is not None)
    with pytest.raises(EngineDead, match="the fake worker broke"):
        await answer(engine, ask("later"))
    assert engine._process.returncode() == 1
    await engine.close()


async def test_hung_engine_turns_health_red_and_close_still_works(model: Path) -> None:
    engine = AsyncEngine.launch(fake_config(model), builder=BUILDER)
    engine.hang_s = 0.3
    engine.exit_grace_s = 0.1
    assert engine.health().alive
    task = asyncio.create_task(answer(engine, ask("hang", [HANG])))
    await until(lambda: not engine.health().alive)
    assert "no progress" in engine.health().reason
    stats_s = time.monotonic()
    await engine.stats()  # the last one there was
    assert time.monotonic() - stats_s < 1.0
    await engine.close()
    assert (await task).finish is FinishReason.ABORT


async def test_health_is_green_when_idle_for_longer_than_the_limit(engine: AsyncEngine) -> None:
    await answer(engine, ask("a"))
    await until(lambda: engine.health().idle)
    engine.hang_s = 0.0
    before = engine.health()
    assert before.alive
    assert before.ready
    await asyncio.sleep(0.05)
    after = engine.health()
    assert (after.alive, after.progress) == (True, before.progress)  # idle: it does not spin


async def test_idle_engine_uses_no_cpu(engine: AsyncEngine) -> None:
    await answer(engine, ask("a"))
    await until(lambda: engine.health().idle)

    def ticks() -> int:
        fields = Path(f"/proc/{engine.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    await asyncio.sleep(0.3)
    assert ticks() - before <= 1


async def test_drain_waits_for_running_requests_and_refuses_new_ones(engine: AsyncEngine) -> None:
    running = asyncio.create_task(answer(engine, ask("run", max_tokens=300)))
    await until(lambda: engine._by_engine_id)
    draining = asyncio.create_task(engine.drain(10.0))
    await asyncio.sleep(0)
    assert not engine.health().ready
    assert engine.health().alive
    with pytest.raises(Overloaded):
        await answer(engine, ask("late"))
    assert await draining is True
    assert (await running).completion_tokens == 300


async def test_drain_aborts_what_takes_too_long(model: Path) -> None:
    engine = AsyncEngine.launch(fake_config(model), builder=BUILDER)
    task = asyncio.create_task(answer(engine, ask("run", max_tokens=480)))
    await until(lambda: engine._by_engine_id)
    await until(lambda: not engine.health().idle)
    assert await engine.drain(0.0) is False
    whole = await task
    assert whole.finish is FinishReason.ABORT
    assert (whole.completion_tokens, whole.text) == (
        len(whole.tokens),
        bytes(whole.tokens).decode(),
    )
    await engine.close()


def test_loading_is_reported_and_a_config_error_travels(model: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    engine = AsyncEngine.launch(
        fake_config(model), builder=BUILDER, on_load=lambda *args: seen.append(args)
    )
    assert seen[-1] == (5, 5, "weights")
    asyncio.run(engine.close())
    with pytest.raises(ConfigError, match=r"no tensor model\.norm\.weight"):
        AsyncEngine.launch(fake_config(model), builder=BROKEN_BUILDER)


def test_interrupted_loading_leaves_no_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the bar is on the screen."""
    started: list[EngineProcess] = []

    class Recorded(EngineProcess):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    def interrupt(done: int, total: int, phase: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("phloem.engine.async_engine.EngineProcess", Recorded)
    with pytest.raises(KeyboardInterrupt):
        AsyncEngine.launch(fake_config(model), builder=BUILDER, on_load=interrupt)
    assert started[0].returncode() == -signal.SIGKILL


def test_unstartable_engine_is_engine_dead_with_its_reason(model: Path) -> None:
    with pytest.raises(EngineDead, match="nothing_here"):
        AsyncEngine.launch(fake_config(model), builder="tests.engine.fakes:nothing_here")


PARENT = textwrap.dedent(
    """
    import asyncio, sys, threading
    from pathlib import Path
    from phloem.core.request import SamplingParams
    from phloem.core.tokens import tokens_to_bytes
    from phloem.engine import AsyncEngine
    from phloem.engine.api import TextRequest
    from tests.engine.fakes import BUILDER, HANG, fake_config
    engine = AsyncEngine.launch(fake_config(Path(sys.argv[1])), builder=BUILDER)

    async def main():
        if sys.argv[2] == "hanging":
            tokens = tokens_to_bytes([HANG])
            sampling = SamplingParams(max_tokens=1)
            request = TextRequest(request_id="h", tokens=tokens, sampling=sampling)
            asyncio.ensure_future(anext(engine.generate(request)))
            while engine.health().idle:
                await asyncio.sleep(0.01)
        print(engine.pid, flush=True)
        threading.Event().wait()

    asyncio.run(main())
    """
)


@pytest.mark.parametrize("state", ["idle", "hanging"])
def test_child_ends_by_itself_when_the_parent_is_killed(model: Path, state: str) -> None:
    """Also in the middle of a step that never ends."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model), state], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGINT)  # Ctrl-C in the terminal: the parent's business
        os.kill(child, 0)
        parent.kill()
    deadline_s = time.monotonic() + 5
    while _runs(child):
        assert time.monotonic() < deadline_s, "the engine process has outlived its parent"


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
