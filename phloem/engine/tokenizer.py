"""Text to token ids and back, exact to the byte."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from phloem.core.errors import BadRequest, ConfigError
from phloem.core.tokens import tokens_to_bytes
from phloem.engine.byte_level import bytes_of_piece
from phloem.engine.chat_template import ChatTemplate

__all__ = ["ModelTokenizer", "PieceCoding"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceCoding(enum.Enum):
    """How a vocabulary entry spells its bytes."""

    BYTE_LEVEL = "byte_level"  # one printable character per byte (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # U+2581 for a space, <0xNN> for a byte


def _coding_of(decoder: Mapping[str, Any] | None) -> tuple[PieceCoding, bool]:
    """The coding that a `decoder` section means, and whether it drops one leading space."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return PieceCoding.BYTE_LEVEL, False
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return PieceCoding.SENTENCEPIECE, bool(kinds & {"Strip", "Metaspace"})
    found = ", ".join(sorted(kinds)) or "none"
    raise ConfigError(
        f"tokenizer.json has an unsupported decoder ({found}); "
        "byte-level BPE and SentencePiece-style decoders are supported"
    )


class ModelTokenizer:
    """A model's tokenizer (`TextTokenizer`). Safe to share: nothing changes after construction."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        template: ChatTemplate | None = None,
    ) -> None:
        state = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        self._coding, self._drops_first_space = _coding_of(state)
        self._tokenizer = tokenizer
        self._template = template
        self._eos_ids = eos_ids
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocab.values(), default=-1) + 1
        self._pieces: list[str | None] = [None] * self._vocab_size
        for piece, token in vocab.items():
            self._pieces[token] = piece
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: entry.content.encode() for token, entry in added.items()}
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._bytes: dict[int, bytes] = dict(self._added)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that stands for something (a model may have more rows)."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids left out of a text when special tokens are skipped."""
        return self._special

    def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Packed int32 ids. Raises BadRequest for text that is no Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}"
            ) from error
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens_to_bytes(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text; bytes that are no valid UTF-8 become U+FFFD. Raises BadRequest for unknown ids."""
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise BadRequest(
                    f"token id {token} is outside the vocabulary (0 ... {self._vocab_size - 1})"
                )
        skipped = self._special if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        if self._drops_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes a token stands for; none for an id that the vocabulary does not name."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        piece = self._pieces[token] if 0 <= token < self._vocab_size else None
        if piece is None:
            return b""
        if self._coding is PieceCoding.BYTE_LEVEL:
            return bytes_of_piece(piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Apply the model's chat template. Raises BadRequest if there is none or it refuses."""
        if self._template is None:
            raise BadRequest("this model has no chat template; use completions instead")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)
