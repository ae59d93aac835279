"""Stop strings across token borders, against full text and str.find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from phloem.engine.stops import StopMatcher


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """First to be complete wins, then the longest."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    end, minus_length, stop = min(found)
    return text[: end + minus_length], stop


def run(parts: Sequence[str], stops: Sequence[str]) -> tuple[list[str], str | None]:
    """What is shown after each part (and at the end), and the stop."""
    matcher = StopMatcher(stops)
    shown = []
    for part in parts:
        text, stop = matcher.feed(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.finish()], None


def test_o36a_stop_one_character_a_token() -> None:
    assert run("abcDEFGh", ["DEFG"]) == (["a", "b", "c", "", "", "", ""], "DEFG")


def test_o36a_beginning_of_a_stop_that_goes_on_otherwise_is_emitted() -> None:
    assert run(["DE", "X"], ["DEFG"]) == (["", "DEX", ""], None)


def test_o36a_held_text_is_flushed_at_the_end() -> None:
    assert run(["a", "DEF"], ["DEFG"]) == (["a", "", "DEF"], None)


def test_o36a_one_stop_a_prefix_of_the_other() -> None:
    assert run(["xD", "E", "FG"], ["DEFG", "DE"]) == (["x", ""], "DE")


def test_o36a_stop_at_the_very_first_token() -> None:
    assert run(["DEFG and more"], ["DEFG"]) == ([""], "DEFG")


def test_stop_complete_first_wins_and_of_equals_the_longest() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == (["a"], "bc")
    assert run(["xabc"], ["bc", "abc"]) == (["x"], "abc")


def test_self_overlapping_stop() -> None:
    """Falling back must keep the longest beginning, not start over."""
    assert run("aabaabaaab", ["aabaaa"]) == (["", "", "", "", "", "aab", "", "", ""], "aabaaa")


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_gives_the_naive_answer(seed: int) -> None:
    """Two-letter alphabet: overlaps everywhere. Nothing is held that could not begin a stop."""
    rng = random.Random(seed)
    for _ in range(1000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 4))]
        text = "".join(rng.choices("aabc", k=rng.randint(0, 25)))
        matcher, shown, stop, seen = StopMatcher(stops), "", None, 0
        while seen < len(text) and stop is None:
            size = rng.randint(1, 5)
            new, stop = matcher.feed(text[seen : seen + size])
            shown += new
            seen += size
            held = text[len(shown) : seen]
            assert stop or not held or any(s.startswith(held) and s != held for s in stops)
        if stop is None:
            shown += matcher.finish()
        assert (shown, stop) == naive(text, stops)


def test_work_per_character_is_bounded() -> None:
    """A long stop that almost matches everywhere costs no rescans: 4,096 x 200,000 characters."""
    matcher = StopMatcher(["a" * 4095 + "b"])
    shown = sum(len(matcher.feed("a" * 2000)[0]) for _ in range(100))
    assert shown == 200_000 - 4095
