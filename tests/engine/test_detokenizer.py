"""Bytes to text: whole characters only, and exactly the text of all bytes at once."""

from __future__ import annotations

import random

import pytest

from phloem.engine.detokenizer import Detokenizer
from tests.engine.fakes import EOS, TOOL, model_tokenizer

TOKENIZER = model_tokenizer()
EMOJI = "\N{WOMAN}\u200d\N{WOMAN}\u200d\N{GIRL}".encode()


def pieces_of(parts: list[bytes]) -> list[str]:
    """What each part (its bytes are its ids) brings, and what the end brings."""
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    return [*(detokenizer.feed(part) for part in parts), detokenizer.finish()]


def test_o36b_four_byte_character_in_three_parts() -> None:
    face = "\N{GRINNING FACE}".encode()
    assert pieces_of([face[:1], face[1:2], face[2:]]) == ["", "", "\N{GRINNING FACE}", ""]


def test_o36b_combining_sequence_is_not_reordered_or_lost() -> None:
    text = "e\N{COMBINING ACUTE ACCENT}\N{COMBINING DOT BELOW}x"
    assert "".join(pieces_of([bytes([b]) for b in text.encode()])) == text


def test_o36b_invalid_byte_in_the_middle_is_one_replacement_and_comes_at_once() -> None:
    assert pieces_of([b"a", b"\xff", b"b"]) == ["a", "\ufffd", "b", ""]


def test_o36b_cut_in_mid_character_is_flushed_at_the_end() -> None:
    assert pieces_of([b"a", b"\xf0\x9f"]) == ["a", "", "\ufffd"]


def test_incomplete_character_then_something_else_is_not_swallowed() -> None:
    assert pieces_of([b"\xe2\x82", b"z"]) == ["", "\ufffdz", ""]


@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_whole_on_random_bytes(seed: int) -> None:
    """Any bytes, cut anywhere: concatenation = decoding all at once."""
    rng = random.Random(seed)
    atoms = [b"a", "é".encode(), EMOJI, b"\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"\xc0\x80"]
    atoms += [b"\xe2\x82", b"\xf4\x90\x80\x80", b"\xe0\x80", bytes([rng.randrange(256)])]
    for _ in range(500):
        data = b"".join(rng.choice(atoms) for _ in range(rng.randrange(9)))
        parts, rest = [], data
        while rest:
            size = rng.randint(1, 4)
            parts.append(rest[:size])
            rest = rest[size:]
        assert "".join(pieces_of(parts)) == data.decode("utf-8", "replace")


def test_special_tokens_are_left_out_only_on_request_and_added_words_never() -> None:
    ids = [ord("a"), EOS, TOOL, ord("b")]
    shown = Detokenizer(TOKENIZER, skip_special_tokens=False).feed(ids)
    skipped = Detokenizer(TOKENIZER, skip_special_tokens=True).feed(ids)
    assert (shown, skipped) == ("a<eos><tool>b", "a<tool>b")
