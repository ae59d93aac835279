"""Stop strings, across any borders of tokens.

The stop that is complete first ends the answer, and of those complete at the same character the
longest: so the outcome depends on the text alone, not on how it was cut into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class _Pattern:
    """One stop string under Knuth-Morris-Pratt: each character is looked at once, ever.

    `matched` characters of the string are the longest proper beginning of it that the text seen so
    far ends with. The table of fall-backs grows only as far as a match has ever come.
    """

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0, 0]  # [k]: the longest border of text[:k]

    def _border(self, length: int) -> int:
        table, text = self._fallback, self.text
        while len(table) <= length:
            size = len(table)
            border = table[size - 1]
            while border and text[border] != text[size - 1]:
                border = table[border]
            table.append(border + (text[border] == text[size - 1]))
        return table[length]

    def feed(self, new: str) -> int:
        """Index in `new` just behind the first complete match, or -1 if none is complete."""
        text, matched = self.text, self.matched
        place, end = 0, len(new)
        while place < end:
            if matched == 0:  # jump to where a match could begin
                place = new.find(text[0], place)
                if place < 0:
                    break
            char = new[place]
            while matched and text[matched] != char:
                matched = self._border(matched)
            matched += text[matched] == char
            place += 1
            if matched == len(text):
                return place
        self.matched = matched
        return -1


class StopMatcher:
    """Passes text through, holding back what may turn out to be the beginning of a stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def feed(self, new: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended the answer, if one did."""
        if not new or not self._patterns:
            return new, None
        found: tuple[int, int, str] | None = None
        for pattern in self._patterns:
            end = pattern.feed(new)
            if end >= 0:
                match = (end, -len(pattern.text), pattern.text)
                found = match if found is None else min(found, match)
        text = self._held + new
        if found is not None:
            end, minus_length, stop = found
            cut = len(self._held) + end + minus_length
            self._held = ""
            return text[:cut], stop
        keep = max(pattern.matched for pattern in self._patterns)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """What is still held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held
