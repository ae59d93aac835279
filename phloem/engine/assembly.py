"""One request's output: engine chunks (token ids) in, text chunks out."""

from __future__ import annotations

from collections.abc import Iterable

from phloem.core.request import (
    CachedTokens,
    FinishReason,
    OutputChunk,
    SamplingParams,
    TokenLogprob,
)
from phloem.engine.api import TextChunk, TextLogprob
from phloem.engine.detokenizer import Detokenizer, TokenSpelling
from phloem.engine.stops import StopMatcher

__all__ = ["TextAssembly", "merge_chunks"]


class TextAssembly:
    """Detokenises and watches for stop strings. After a chunk with `finish` it takes no more."""

    def __init__(
        self, spelling: TokenSpelling, sampling: SamplingParams, *, skip_special_tokens: bool
    ) -> None:
        self._spelling = spelling
        self._sampling = sampling
        self._detokenizer = Detokenizer(spelling, skip_special_tokens=skip_special_tokens)
        self._stops = StopMatcher(sampling.stop)
        self._num_tokens = 0
        self._prompt_tokens = 0
        self._cached = CachedTokens()
        self.finished = False

    def feed(self, chunk: OutputChunk) -> TextChunk:
        """The text of new tokens; `finish` is STOP where a stop string ended it just now.

        In that case the tokens behind the one that completed the stop are dropped, and the caller
        must abort the request at the engine, unless `chunk` ended it as well.
        """
        assert not self.finished, f"request {chunk.request_id} has ended already"
        self._prompt_tokens, self._cached = chunk.prompt_tokens, chunk.cached
        if len(chunk.tokens) == 1 and chunk.finish is None and not chunk.logprobs:
            return self._feed_one(chunk)  # nearly always: the others may be slower
        text: list[str] = []
        taken = 0
        stop: str | None = None
        for token in chunk.tokens:
            taken += 1
            silent = token == chunk.stop_token and taken == len(chunk.tokens)
            shown, stop = self._take(() if silent else (token,))
            text.append(shown)
            if stop is not None:
                break
        finish = chunk.finish if stop is None else FinishReason.STOP
        if chunk.finish is not None and stop is None:
            shown, stop = self._end()
            text.append(shown)
            # A held-back, cut character can complete a stop only at the very end.
            finish = chunk.finish if stop is None else FinishReason.STOP
        self.finished = finish is not None
        return TextChunk(
            text="".join(text),
            tokens=chunk.tokens[:taken],
            logprobs=tuple(self._logprob(entry) for entry in chunk.logprobs[:taken]),
            finish=finish,
            stop_reason=stop if stop is not None else self._stop_id(chunk),
            error=chunk.error if stop is None else None,
            prompt_tokens=chunk.prompt_tokens,
            completion_tokens=self._num_tokens,
            cached=chunk.cached,
        )

    def _feed_one(self, chunk: OutputChunk) -> TextChunk:
        """`feed` of one token that does not end the answer by itself."""
        text, stop = self._take(chunk.tokens)
        self.finished = stop is not None
        return TextChunk(
            text=text,
            tokens=chunk.tokens,
            finish=None if stop is None else FinishReason.STOP,
            stop_reason=stop,
            prompt_tokens=chunk.prompt_tokens,
            completion_tokens=self._num_tokens,
            cached=chunk.cached,
        )

    def cut_off(self) -> TextChunk:
        """The last chunk of an answer that is aborted here: what was held back, and the totals."""
        self.finished = True
        text, _ = self._end()
        return TextChunk(
            text=text,
            finish=FinishReason.ABORT,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._num_tokens,
            cached=self._cached,
        )

    def _take(self, tokens: tuple[int, ...]) -> tuple[str, str | None]:
        self._num_tokens += 1
        text = self._detokenizer.feed(tokens)
        if self._num_tokens <= self._sampling.min_tokens:
            return text, None  # the first min_tokens tokens cannot end the answer
        return self._stops.feed(text)

    def _end(self) -> tuple[str, str | None]:
        shown, stop = self._stops.feed(self._detokenizer.finish())
        return (shown, stop) if stop is not None else (shown + self._stops.finish(), None)

    def _stop_id(self, chunk: OutputChunk) -> int | None:
        """The id that ended it where the caller had asked for that id (EOS is no such news)."""
        return chunk.stop_token if chunk.stop_token in self._sampling.stop_token_ids else None

    def _logprob(self, entry: TokenLogprob) -> TextLogprob:
        top = tuple(self._named(token, logprob) for token, logprob in entry.top)
        return self._named(entry.token, entry.logprob, top)

    def _named(self, token: int, logprob: float, top: tuple[TextLogprob, ...] = ()) -> TextLogprob:
        raw = self._spelling.token_bytes(token)
        return TextLogprob(token, raw.decode("utf-8", "replace"), raw, logprob, top)


def merge_chunks(chunks: Iterable[TextChunk]) -> TextChunk:
    """Several consecutive chunks as one. There must be at least one."""
    parts = tuple(chunks)
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    return TextChunk(
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        finish=last.finish,
        stop_reason=last.stop_reason,
        error=last.error,
        prompt_tokens=last.prompt_tokens,
        completion_tokens=last.completion_tokens,
        cached=last.cached,
    )
