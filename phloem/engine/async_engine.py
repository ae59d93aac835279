"""AsyncEngine: many requests at once against the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from phloem.config import Config
from phloem.config.checkpoint import read_model_config
from phloem.core.errors import (
    BadRequest,
    EngineDead,
    Overloaded,
    PhloemError,
    UserError,
)
from phloem.core.namespace import make_namespace
from phloem.core.request import GenerateRequest, OutputChunk
from phloem.core.stats import EngineStats
from phloem.engine import messages as msg
from phloem.engine.api import Health, ModelCard, TextChunk, TextRequest
from phloem.engine.assembly import TextAssembly
from phloem.engine.channel import Channel
from phloem.engine.checks import check_request
from phloem.engine.commands import Command, CommandReply
from phloem.engine.core import OnLoad
from phloem.engine.engine_ids import engine_id
from phloem.engine.facts import EngineFacts
from phloem.engine.health import DEFAULT_HANG_S, judge_health
from phloem.engine.mailbox import Mailbox
from phloem.engine.models import load_tokenizer, resolve_model
from phloem.engine.process import DEFAULT_BUILDER, EXIT_GRACE_S, EngineProcess
from phloem.engine.tier_parts import SHUTDOWN_FLUSH_S
from phloem.engine.tokenizer import ModelTokenizer

__all__ = ["AsyncEngine"]

# `stats` asks the loop, which answers between two steps. A step may take seconds: then the last
# answer has to do.
_STATS_PATIENCE_S = 0.25


class _Open:
    """A request that some coroutine is waiting for."""

    __slots__ = ("assembly", "at_engine", "engine_id", "mailbox", "request_id")

    def __init__(self, request_id: str, engine_id: str, assembly: TextAssembly) -> None:
        self.request_id = request_id
        self.engine_id = engine_id
        self.assembly = assembly
        self.mailbox = Mailbox()
        self.at_engine = True  # until its last chunk has come, or it has been aborted


class AsyncEngine:
    """An `EngineClient` over a child process. Belongs to the event loop that first uses it."""

    def __init__(
        self,
        process: EngineProcess,
        ready: msg.Ready,
        tokenizer: ModelTokenizer,
        config: Config,
    ) -> None:
        """Takes over a process that is ready; see `launch`."""
        self._process = process
        self._facts = ready.facts
        self._tokenizer = tokenizer
        self._limit = config.scheduler.max_running + config.scheduler.max_queued
        self.hang_s = DEFAULT_HANG_S
        # From `close` to a kill: a step in flight may end, pages may be written to storage.
        has_tiers = config.tiers.host_memory_bytes != 0
        self.exit_grace_s = EXIT_GRACE_S + has_tiers * SHUTDOWN_FLUSH_S
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attaching = asyncio.Lock()
        self._channel: Channel | None = None
        self._open: dict[str, _Open] = {}  # by the caller's request id
        self._by_engine_id: dict[str, _Open] = {}  # those still at the engine
        self._serial = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_stats = ready.stats
        self._last_send_s = time.monotonic()
        self._draining = False
        self._death: EngineDead | None = None
        self._all_gone = asyncio.Event()
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    def launch(
        cls, config: Config, *, on_load: OnLoad | None = None, builder: str = DEFAULT_BUILDER
    ) -> AsyncEngine:
        """Start the engine process and block until the model is loaded.

        `on_load(done, total, phase)` is called on the way. Raises ConfigError for a model or
        setting that cannot be used, EngineDead if the process ends. Needs no running event loop.
        """
        model = resolve_model(config.model.model)
        read_model_config(model.path)  # what cannot be served is refused before torch is loaded
        process = EngineProcess()
        try:
            tokenizer = load_tokenizer(model)  # while the child's interpreter starts
            process.start(config, eos_ids=tokenizer.eos_ids, builder=builder)
            ready = process.wait_ready(on_load)
        except BaseException:  # also Ctrl-C while it loads: no process may be left behind
            process.close()
            raise
        return cls(process, ready, tokenizer, config)

    @property
    def card(self) -> ModelCard:
        return self._facts.card

    @property
    def facts(self) -> EngineFacts:
        """What was loaded and what it takes (see `startup_rows`)."""
        return self._facts

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self._tokenizer

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def check(self, request: TextRequest) -> None:
        """Raise BadRequest now for what can never be served."""
        check_request(request, self.card)

    # Requests.

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        """Stream a completion. Closing the iterator before its end aborts the request.

        Raises UserError if the request is refused, EngineDead if the engine has ended. Requests
        reach the engine in the order in which their iterators are first asked.
        """
        self.check(request)
        channel = await self._attach()
        entry = self._admit(request, channel)
        try:
            while True:
                chunk = await entry.mailbox.get()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._leave(entry)

    def _admit(self, request: TextRequest, channel: Channel) -> _Open:
        if self._draining:
            raise Overloaded("the server is shutting down")
        if request.request_id in self._open:
            raise BadRequest(
                f"a request with id {request.request_id!r} is running", param="request_id"
            )
        if len(self._by_engine_id) >= self._limit:
            raise Overloaded(f"{self._limit} requests are running or queued", code="queue_full")
        name = engine_id(next(self._serial), request.request_id)
        assembly = TextAssembly(
            self._tokenizer, request.sampling, skip_special_tokens=request.skip_special_tokens
        )
        entry = _Open(request.request_id, name, assembly)
        self._open[request.request_id] = entry
        self._by_engine_id[name] = entry
        self._last_send_s = time.monotonic()
        channel.send(msg.Add(self._engine_request(request, name)))
        return entry

    def _engine_request(self, request: TextRequest, name: str) -> GenerateRequest:
        return GenerateRequest(
            request_id=name,
            tokens=request.tokens,
            sampling=request.sampling,
            namespace=make_namespace(model=self.card.path, salt=request.cache_salt),
            routing_key=request.routing_key,
            priority=request.priority,
            arrival_s=self._last_send_s,
        )

    def _leave(self, entry: _Open) -> None:
        """Its coroutine has gone: finished, closed or cancelled."""
        self._abort(entry)
        del self._open[entry.request_id]
        if not self._open:
            self._all_gone.set()

    def _abort(self, entry: _Open) -> None:
        """Tell the engine that nobody waits, unless it has finished by itself."""
        if entry.at_engine:
            self._forget(entry)
            if self._channel is not None:
                self._channel.send(msg.Abort(entry.engine_id))

    def _forget(self, entry: _Open) -> None:
        entry.at_engine = False
        del self._by_engine_id[entry.engine_id]

    # What the engine says.

    def _on_message(self, message: msg.ToFront) -> None:
        match message:
            case msg.Outputs():
                for chunk in message.chunks:
                    self._on_chunk(chunk)
            case msg.Refused():
                self._on_refused(message)
            case msg.StatsReply():
                self._last_stats = message.stats
                self._answer(message.call, message.stats)
            case msg.Flushed():
                self._answer(message.call, message.locked_pages)
            case msg.Operated():
                self._answer(message.call, message.reply)
            case msg.Failed():
                self._process.note_failure(message.message)

    def _on_chunk(self, chunk: OutputChunk) -> None:
        entry = self._by_engine_id.get(chunk.request_id)
        if entry is None:
            return  # aborted meanwhile
        text = entry.assembly.feed(chunk)
        if chunk.finish is not None:
            self._forget(entry)
        elif text.finish is not None:  # a stop string: the engine does not know text
            self._abort(entry)
        entry.mailbox.put(text)

    def _on_refused(self, message: msg.Refused) -> None:
        entry = self._by_engine_id.get(message.request_id)
        if entry is not None:
            self._forget(entry)
            kind: type[UserError] = Overloaded if message.status == 503 else BadRequest
            entry.mailbox.fail(kind(message.message, param=message.param, code=message.code))

    # Connection and death.

    async def _attach(self) -> Channel:
        """The channel, opened at first use on the running event loop."""
        loop = asyncio.get_running_loop()
        async with self._attaching:
            if self._death is not None:
                raise self._death
            if self._channel is None:
                self._loop = loop
                _, self._channel = await loop.create_connection(
                    lambda: Channel(self._process.frames, self._on_message, self._on_closed),
                    sock=self._process.sock,
                )
            if self._loop is not loop:
                raise PhloemError("an AsyncEngine serves the event loop that first used it")
            return self._channel

    def _on_closed(self) -> None:
        assert self._loop is not None, "a channel closed that was never opened"
        if self._death is None:
            self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        """The socket has closed by itself: learn why, and tell everyone who waits."""
        death = await asyncio.to_thread(self._process.death)
        self._fail_all(death)

    def _fail_all(self, death: EngineDead) -> None:
        if self._death is None:
            self._death = death
        for entry in list(self._by_engine_id.values()):
            self._forget(entry)
            entry.mailbox.fail(self._death)
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(self._death)

    # Calls.

    def _call(self, channel: Channel, kind: type[msg.Stats] | type[msg.Flush]) -> Awaitable[Any]:
        call = next(self._serial)
        future = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        channel.send(kind(call))
        return future

    def _answer(self, call: int, value: Any) -> None:
        future = self._calls.pop(call, None)
        if future is not None and not future.done():
            future.set_result(value)

    async def stats(self) -> EngineStats:
        """A snapshot of the counters; in the middle of a long step, the last one there was."""
        channel = await self._attach()
        answer = self._call(channel, msg.Stats)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answer, _STATS_PATIENCE_S)
        return self._last_stats

    async def flush_cache(self) -> int:
        """Forget every page that no running request holds; returns how many stay locked."""
        locked: int = await self._call(await self._attach(), msg.Flush)
        return locked

    async def operate(self, command: Command) -> dict[str, Any]:
        """Carry out an operator's command. Raises BadRequest with the engine's reason."""
        channel = await self._attach()
        call = next(self._serial)
        future: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        channel.send(msg.Operate(call, command))
        reply = await future
        if reply.error is not None:
            raise BadRequest(reply.error, code="command_refused")
        return reply.result

    def health(self) -> Health:
        """At once, from shared memory: no message, no waiting."""
        return judge_health(
            self._process,
            waiting_since_s=self._last_send_s if self._by_engine_id else None,
            draining=self._draining,
            hang_s=self.hang_s,
        )

    # The end.

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the running ones; False if some had to be aborted."""
        self._draining = True
        self._all_gone.clear()
        if not self._open:
            return True
        try:
            await asyncio.wait_for(self._all_gone.wait(), timeout_s)
        except TimeoutError:
            self._abort_all()
            return False
        return True

    def _abort_all(self) -> None:
        for entry in list(self._by_engine_id.values()):
            self._abort(entry)
            entry.mailbox.put(entry.assembly.cut_off())

    async def close(self) -> None:
        """Abort what runs, stop the process and wait for its end. Idempotent."""
        self._draining = True
        if self._death is None:
            self._death = EngineDead("the engine has been closed")
            self._abort_all()
            self._fail_all(self._death)
            if self._channel is not None:
                self._channel.send(msg.Shutdown())
            else:
                with contextlib.suppress(OSError):
                    self._process.sock.sendall(msg.frame(msg.Shutdown()))
            await asyncio.to_thread(self._process.stop, grace_s=self.exit_grace_s)
        if self._burial is not None:
            await self._burial
        if self._channel is not None:
            self._channel.close()
        await asyncio.to_thread(self._process.close)
