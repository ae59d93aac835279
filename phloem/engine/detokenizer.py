"""Tokens to text, a few at a time: what is not yet a whole character is held back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Detokenizer", "TokenSpelling"]


class TokenSpelling(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """One answer's bytes, decoded as they come.

    The concatenation of all that `feed` and `finish` return is exactly the text of all bytes
    decoded at once: U+FFFD stands only for bytes that are invalid, or cut off at the end.
    """

    def __init__(self, spelling: TokenSpelling, *, skip_special_tokens: bool) -> None:
        self._spell = spelling.token_bytes
        self._skipped = spelling.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # whether the decoder may hold the beginning of a character

    def feed(self, tokens: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        skipped = self._skipped
        data = b"".join([self._spell(token) for token in tokens if token not in skipped])
        if not self._holds and data.isascii():  # nearly always
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What is still held back, now that nothing follows."""
        return self._decoder.decode(b"", final=True)
