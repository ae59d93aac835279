"""The tokenizer inside a GGUF file: vocabulary, merges and the name of a pre-tokenizer."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from phloem.core.errors import ConfigError
from phloem.engine.chat_template import ChatTemplate
from phloem.engine.tokenizer import ModelTokenizer

__all__ = ["gguf_tokenizer"]

_PREFIX = "tokenizer.ggml."

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"


class _TokenType(enum.IntEnum):
    """GGUF's token types that matter here."""

    CONTROL = 3
    USER_DEFINED = 4


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _by_regex(_LLAMA3),
    "llama3": lambda: _by_regex(_LLAMA3),
    "llama-v3": lambda: _by_regex(_LLAMA3),
    "qwen2": lambda: _by_regex(_QWEN2),
}
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
# Ends of a turn that some files name only by their text.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>")


def _base(metadata: Mapping[str, Any]) -> tuple[Tokenizer, str]:
    """BPE with the right pre-tokenizer, and that one's name."""
    kind = metadata.get(_PREFIX + "model")
    if kind != "gpt2":
        raise ConfigError(
            f"the GGUF file has a {kind!r} tokenizer; only byte-level BPE ('gpt2') is supported. "
            "Use the model's Hugging Face folder with its tokenizer.json instead"
        )
    pre = metadata.get(_PREFIX + "pre", "default")
    if pre not in _PRE:
        known = ", ".join(sorted(_PRE))
        raise ConfigError(f"the GGUF file's pre-tokenizer {pre!r} is unknown (known: {known})")
    for name in ("tokens", "merges", "token_type"):
        if _PREFIX + name not in metadata:
            raise ConfigError(f"the GGUF file lacks {_PREFIX}{name}")
    vocab = {piece: token for token, piece in enumerate(metadata[_PREFIX + "tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[_PREFIX + "merges"]]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # the library raises it bare, e.g. for a merge of unknown pieces
        raise ConfigError(f"the GGUF file's vocabulary cannot be used: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, pre


def _add_tokens(tokenizer: Tokenizer, pieces: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are matched in the text before anything else."""
    for piece, kind in zip(pieces, types, strict=True):
        if kind == _TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False)])
        elif kind == _TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False)])


def _eos_ids(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [int(metadata[_PREFIX + name]) for name in names if _PREFIX + name in metadata]
    special = tokenizer.get_added_tokens_decoder()
    for text in _END_OF_TURN:
        token = tokenizer.token_to_id(text)
        if token is not None and token in special:
            ids.append(token)
    return tuple(dict.fromkeys(ids))


def gguf_tokenizer(metadata: Mapping[str, Any]) -> ModelTokenizer:
    """Build the tokenizer from a GGUF file's metadata. Raises ConfigError for an unknown kind."""
    tokenizer, pre = _base(metadata)
    pieces = list(metadata[_PREFIX + "tokens"])
    _add_tokens(tokenizer, pieces, list(metadata[_PREFIX + "token_type"]))
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token = metadata.get(f"{_PREFIX}{name}_token_id")
        if token is not None and int(token) < len(pieces):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            special[f"{short}_token"] = pieces[int(token)]
    if metadata.get(_PREFIX + "add_bos_token", pre in _LLAMA3_NAMES) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    source = metadata.get("tokenizer.chat_template")
    template = None if source is None else ChatTemplate(source, special)
    return ModelTokenizer(tokenizer, eos_ids=_eos_ids(metadata, tokenizer), template=template)
