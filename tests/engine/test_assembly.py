"""Token ids to text chunks: cases O-36 a and b with a byte-level tokenizer and scripted ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from phloem.core.request import FinishReason, OutputChunk, SamplingParams, TokenLogprob
from phloem.engine.api import TextChunk
from phloem.engine.assembly import TextAssembly, merge_chunks
from tests.engine.fakes import EOS, model_tokenizer
from tests.engine.test_stops import naive

TOKENIZER = model_tokenizer()


def assemble(
    groups: Sequence[Sequence[int]],
    sampling: SamplingParams | None = None,
    *,
    finish: FinishReason = FinishReason.LENGTH,
    stop_token: int | None = None,
) -> list[TextChunk]:
    """One engine chunk per group of ids; the last one carries `finish`."""
    assembly = TextAssembly(
        TOKENIZER, sampling or SamplingParams(max_tokens=1000), skip_special_tokens=True
    )
    out = []
    for index, group in enumerate(groups):
        last = index == len(groups) - 1
        out.append(
            assembly.feed(
                OutputChunk(
                    request_id="r",
                    tokens=tuple(group),
                    logprobs=tuple(TokenLogprob(t, -1.0, ((t, -1.0),)) for t in group),
                    finish=finish if last else None,
                    stop_token=stop_token if last else None,
                    prompt_tokens=7,
                )
            )
        )
        if out[-1].finish is not None:
            break
    return out


def singles(data: bytes) -> list[list[int]]:
    return [[byte] for byte in data]


def test_o36a_stop_ends_the_answer_and_is_never_shown() -> None:
    chunks = assemble(singles(b"abcDEFGzz"), SamplingParams(max_tokens=99, stop=("DEFG",)))
    whole = merge_chunks(chunks)
    assert (whole.text, whole.finish, whole.stop_reason) == ("abc", FinishReason.STOP, "DEFG")
    assert whole.completion_tokens == 7
    assert bytes(whole.tokens) == b"abcDEFG"


def test_tokens_behind_a_stop_in_the_same_chunk_are_dropped() -> None:
    (chunk,) = assemble([list(b"xENDyy")], SamplingParams(max_tokens=99, stop=("END",)))
    assert (chunk.text, bytes(chunk.tokens), chunk.completion_tokens) == ("x", b"xEND", 4)
    assert len(chunk.logprobs) == 4


def test_o36a_half_a_stop_is_shown_when_the_answer_ends() -> None:
    whole = merge_chunks(assemble(singles(b"aDE"), SamplingParams(max_tokens=3, stop=("DEFG",))))
    assert (whole.text, whole.finish, whole.stop_reason) == ("aDE", FinishReason.LENGTH, None)


def test_o36b_cut_in_mid_character_by_max_tokens() -> None:
    chunks = assemble(singles("ab\N{GRINNING FACE}".encode()[:-1]))
    assert [chunk.text for chunk in chunks] == ["a", "b", "", "", "\ufffd"]


def test_eos_is_not_shown_even_with_special_tokens_and_is_no_stop_reason() -> None:
    assembly = TextAssembly(TOKENIZER, SamplingParams(), skip_special_tokens=False)
    chunk = assembly.feed(
        OutputChunk(request_id="r", tokens=(97, EOS), finish=FinishReason.STOP, stop_token=EOS)
    )
    assert (chunk.text, chunk.stop_reason, chunk.completion_tokens) == ("a", None, 2)


def test_stop_token_id_that_was_asked_for_is_the_stop_reason_and_not_shown() -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(98,))
    (chunk,) = assemble([[97, 98]], sampling, finish=FinishReason.STOP, stop_token=98)
    assert (chunk.text, chunk.stop_reason) == ("a", 98)


def test_stop_strings_do_not_count_in_the_first_min_tokens() -> None:
    sampling = SamplingParams(max_tokens=99, min_tokens=4, stop=("b",))
    whole = merge_chunks(assemble(singles(b"abababab"), sampling))
    assert (whole.text, whole.completion_tokens) == ("ababa", 6)


def test_logprobs_carry_text_and_exact_bytes() -> None:
    (chunk,) = assemble([[0xF0]])
    (entry,) = chunk.logprobs
    assert (entry.raw, entry.text, entry.top[0].raw) == (b"\xf0", "\ufffd", b"\xf0")


def test_cut_off_answer_keeps_its_totals_and_shows_what_was_held() -> None:
    assembly = TextAssembly(
        TOKENIZER, SamplingParams(max_tokens=9, stop=("bcd",)), skip_special_tokens=True
    )
    first = assembly.feed(OutputChunk(request_id="r", tokens=tuple(b"abc"), prompt_tokens=7))
    last = assembly.cut_off()
    assert (first.text, last.text, last.finish) == ("a", "bc", FinishReason.ABORT)
    assert (last.prompt_tokens, last.completion_tokens) == (7, 3)


def test_an_error_is_passed_on() -> None:
    assembly = TextAssembly(TOKENIZER, SamplingParams(), skip_special_tokens=True)
    chunk = assembly.feed(
        OutputChunk(request_id="r", finish=FinishReason.ERROR, error="NaN logits")
    )
    assert (chunk.finish, chunk.error) == (FinishReason.ERROR, "NaN logits")


@pytest.mark.parametrize("seed", range(10))
def test_stream_equals_whole_for_any_grouping(seed: int) -> None:
    """Random bytes and stops: text = naive cut of the decoded whole, however ids are grouped."""
    rng = random.Random(seed)
    atoms = ["a", "b", "ab", "é", "\N{GRINNING FACE}"]
    for _ in range(300):
        data = "".join(rng.choices(atoms, k=rng.randint(1, 12))).encode()
        if rng.random() < 0.3:
            data = data[:-1] + bytes([rng.randrange(256)])
        stops = tuple("".join(rng.choices(atoms, k=rng.randint(1, 3))) for _ in range(2))
        groups, rest = [], list(data)
        while rest:
            size = rng.randint(1, 4)
            groups.append(rest[:size])
            rest = rest[size:]
        whole = merge_chunks(assemble(groups, SamplingParams(max_tokens=999, stop=stops)))
        assert (whole.text, whole.stop_reason) == naive(data.decode("utf-8", "replace"), stops)
