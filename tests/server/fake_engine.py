"""An engine for the HTTP layer's tests: scripted answers, gates, errors, and a strict record.

Tokenizer: id = byte (0 ... 255), 256 = EOS, 257 = BOS, vocabulary of 300 ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from phloem.core.errors import BadRequest, EngineDead, Overloaded
from phloem.core.request import CachedTokens, FinishReason
from phloem.core.stats import CacheStats, EngineStats, ReplicaStats
from phloem.core.tokens import num_tokens, tokens_from_bytes, tokens_to_bytes
from phloem.engine.api import Health, ModelCard, TextChunk, TextLogprob, TextRequest
from phloem.engine.commands import AttachStorage, Command, ListCache, ListDecisions

EOS, BOS, VOCAB, CONTEXT = 256, 257, 300, 256


class ByteTokenizer:
    """One token a byte."""

    eos_ids = (EOS,)
    vocab_size = VOCAB

    def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        return tokens_to_bytes(list(text.encode()))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        if messages[-1]["content"] == "refuse the template":
            raise BadRequest("the chat template refuses this")
        body = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return body + ("assistant:" if add_generation_prompt else "")


class Gate:
    """A step of a script: wait until the test opens it."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    def open(self) -> None:
        self.opened.set()


def cached_of(prompt_tokens: int) -> CachedTokens:
    """What the fake claims to have found of a prompt."""
    found = max(0, min(3, prompt_tokens - 1))
    return CachedTokens(device=found // 2 + found % 2, host=found // 2)


Step = str | bytes | Gate | Exception | TextChunk


def letters(request: TextRequest) -> Iterable[Step]:
    """The default script: a, b, c ... up to max_tokens."""
    return [chr(97 + i % 26) for i in range(request.sampling.max_tokens)]


class FakeEngine:
    """Implements EngineClient. `script(request)` yields what the answer is made of.

    str: its bytes as tokens and its text at once. bytes: tokens without text (held back).
    TextChunk: verbatim. Gate: wait. Exception: raised (EngineDead, Overloaded, ...).
    A script that ends without a finish gets LENGTH if it used max_tokens, else STOP.
    """

    def __init__(self, script: Callable[[TextRequest], Iterable[Step]] = letters) -> None:
        self.script = script
        self.tokenizer = ByteTokenizer()
        self.card = ModelCard(
            name="fake", path="/models/fake", architecture="Fake", dtype="float32", device="cpu",
            vocab_size=VOCAB, max_model_len=CONTEXT, page_size=4, num_pages=128, page_bytes=64,
            created_s=1_700_000_000,
        )  # fmt: skip
        self.requests: list[TextRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.changed = asyncio.Condition()
        self.alive = True
        self.draining = False
        self.cut = asyncio.Event()  # set when draining ran out of time
        self.closed = 0
        self.ended = False
        self.stats_gate: Gate | None = None
        self.flushed = 0
        self.commands: list[Command] = []
        self.totals = {"prompt": 0, "generated": 0, "device": 0, "host": 0}

    def check(self, request: TextRequest) -> None:
        if num_tokens(request.tokens) + request.sampling.max_tokens > CONTEXT:
            raise BadRequest("the server must have refused this before asking the engine")

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the record satisfies `condition`."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), 5)

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        if not self.alive:
            raise EngineDead("killed by the test")
        if self.draining:
            raise Overloaded("the server is shutting down")
        rid = request.request_id
        assert rid not in self.running, "the server must keep the engine's ids unique"
        self.requests.append(request)
        self.running.add(rid)
        await self._note()
        prompt = num_tokens(request.tokens)
        self.totals["prompt"] += prompt
        cached = cached_of(prompt)
        self.totals["device"] += cached.device
        self.totals["host"] += cached.host
        record = self.aborted  # closed or cancelled before the record says otherwise
        try:
            async for chunk in self._play(request, prompt):
                yield chunk
            record = self.finished  # only now: closing at the last chunk counts as an abort
        except GeneratorExit:
            raise
        except Exception:
            record = self.failed
            raise
        finally:
            self.running.discard(rid)
            record.append(rid)
            # Closing must not wait, so waiters are told by a task.
            self._tell = asyncio.get_running_loop().create_task(self._note())

    async def _play(self, request: TextRequest, prompt: int) -> AsyncIterator[TextChunk]:
        count = 0
        for step in self.script(request):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, Gate):
                step.reached.set()
                await self._note()
                await step.opened.wait()
            elif isinstance(step, TextChunk):
                count += len(step.tokens)
                yield step
                if step.finish is not None:
                    return
            else:
                text = step if isinstance(step, str) else ""
                tokens = tuple(step.encode() if isinstance(step, str) else step)
                count += len(tokens)
                self.totals["generated"] += len(tokens)
                yield TextChunk(
                    text=text,
                    tokens=tokens,
                    logprobs=self._logprobs(tokens, request.sampling.logprobs),
                    prompt_tokens=prompt,
                    completion_tokens=count,
                    cached=cached_of(prompt),
                )
                await asyncio.sleep(0)
        full = count >= request.sampling.max_tokens
        yield TextChunk(
            finish=FinishReason.LENGTH if full else FinishReason.STOP,
            stop_reason=None if full else EOS,
            prompt_tokens=prompt,
            completion_tokens=count,
            cached=cached_of(prompt),
        )

    def _logprobs(self, tokens: Sequence[int], wanted: int | None) -> tuple[TextLogprob, ...]:
        if wanted is None:
            return ()

        def entry(token: int, logprob: float) -> TextLogprob:
            raw = self.tokenizer.token_bytes(token)
            return TextLogprob(token, raw.decode("utf-8", "replace"), raw, logprob)

        out = []
        for token in tokens:
            top = tuple(entry((token + i) % 256, -0.5 - i) for i in range(wanted))
            first = entry(token, -0.5)
            out.append(TextLogprob(token, first.text, first.raw, -0.5, top))
        return tuple(out)

    async def stats(self) -> EngineStats:
        if self.stats_gate is not None:
            await self.stats_gate.opened.wait()
        if not self.alive:
            raise EngineDead("killed by the test")
        used = len(self.running)
        return EngineStats(
            running=used, queued=0,
            cache=CacheStats(
                page_size=4, total_pages=128, free_pages=115 - used, evictable_pages=10,
                locked_pages=used, nodes=3, evicted_pages_total=5,
                replicas=ReplicaStats(
                    pages=3, most_pages=16, made_pages_total=9, served_pages_total=70,
                    dropped_pages_total=(("room", 4), ("cold", 2)),
                ),
            ),
            prompt_tokens_total=self.totals["prompt"],
            cached_tokens_total=CachedTokens(
                device=self.totals["device"], host=self.totals["host"]
            ),
            generated_tokens_total=self.totals["generated"],
            finished_total=(("length", len(self.finished)), ("abort", len(self.aborted))),
        )  # fmt: skip

    async def flush_cache(self) -> int:
        self.flushed += 1
        return len(self.running)

    async def operate(self, command: Command) -> dict[str, Any]:
        if not self.alive:
            raise EngineDead("killed by the test")
        self.commands.append(command)
        if isinstance(command, AttachStorage) and command.directory == "/refused":
            raise BadRequest("this engine has no host tier", code="command_refused")
        if isinstance(command, ListCache):
            row = {"head": list(b"hello") + [EOS], "device_pages": 2, "host_pages": 1}
            return {"prefixes": [row], "of": 1}
        if isinstance(command, ListDecisions):
            return {"decisions": [{"request_id": command.request_id}]}
        return {"ok": True}

    def health(self) -> Health:
        return Health(
            alive=self.alive, ready=self.alive and not self.draining, idle=not self.running,
            progress=1, since_progress_s=0.0, reason="" if self.alive else "killed",
            ended=self.ended,
        )  # fmt: skip

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        try:
            async with self.changed:
                await asyncio.wait_for(self.changed.wait_for(lambda: not self.running), timeout_s)
        except TimeoutError:
            self.cut.set()
            return False
        return True

    async def close(self) -> None:
        self.closed += 1


def ids_of(request: TextRequest) -> list[int]:
    """A request's prompt as a list."""
    ids: list[int] = tokens_from_bytes(request.tokens).tolist()
    return ids
