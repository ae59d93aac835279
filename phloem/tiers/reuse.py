"""Reuse: which pages are worth a copy, by what became of pages like them.

A page that is used a second time is worth one: its uses are remembered across eviction. But many
hits are a page's first reuse, and for those its copy must have been made before anything is known
of it. So pages are also told apart by what is known when they are computed,

    class = (how much of the prompt was known, log2 of its new pages, log2 of the page's position)

and the first-reuse rate of every class is counted. A new page is worth a copy if its class does
better than pages do on the whole. Nothing is tuned to a workload: rates are measured as it runs.

Pages are named by content keys, which are hints here and decide nothing but a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from phloem.cache.chain import KEY_BYTES
from phloem.cache.node import Node

__all__ = ["Reuse"]

CAPACITY = 1 << 18  # pages remembered
LEAST_SEEN = 64  # pages of a class before it is judged: until then they are copied
MARGIN = 1.05  # how much better than the average a class must do

_Class: TypeAlias = tuple[int, int, int]


class _Rate:
    """Pages of a class, and how many of them were used again."""

    __slots__ = ("reused", "seen")

    def __init__(self) -> None:
        self.seen = self.reused = 0


class Reuse:
    """Remembers uses by page; the oldest memory is forgotten first."""

    __slots__ = ("_all", "_capacity", "_classes", "_pages", "_threshold")

    def __init__(self, threshold: int, capacity: int = CAPACITY) -> None:
        self._threshold = threshold
        self._capacity = capacity
        self._pages: OrderedDict[bytes, tuple[int, _Class]] = OrderedDict()  # uses, class
        self._classes: dict[_Class, _Rate] = {}
        self._all = _Rate()

    def note(self, node: Node) -> int:
        """A request has used the path down to `node`; how many of its first pages want a copy."""
        keys = _path_keys(node)
        pages = self._pages
        known = 0
        while known < len(keys) and keys[known] in pages:
            self._use_again(keys[known])
            known += 1
        new = (len(keys) - known).bit_length()
        for position in range(known, len(keys)):
            key = keys[position]
            if key in pages:  # forgotten ones lay before it
                self._use_again(key)
                continue
            kind = (min(known, 2), new, position.bit_length())
            pages[key] = (1, kind)
            self._rate(kind).seen += 1
            self._all.seen += 1
        while len(pages) > self._capacity:
            pages.popitem(last=False)
        worth = 0
        while worth < len(keys) and self._is_worth(keys[worth]):
            worth += 1
        return worth

    def is_hot(self, node: Node) -> bool:
        """Whether the node's last page wants a copy."""
        return self._is_worth(node.chain[-KEY_BYTES:])

    def _use_again(self, key: bytes) -> None:
        uses, kind = self._pages.pop(key)
        self._pages[key] = (uses + 1, kind)
        if uses == 1:
            self._rate(kind).reused += 1
            self._all.reused += 1

    def _rate(self, kind: _Class) -> _Rate:
        rate = self._classes.get(kind)
        if rate is None:
            rate = self._classes[kind] = _Rate()
        return rate

    def _is_worth(self, key: bytes) -> bool:
        uses, kind = self._pages.get(key, (0, (0, 0, 0)))
        if uses >= self._threshold:
            return True
        rate = self._classes.get(kind)
        if not uses or rate is None:
            return False
        if rate.seen < LEAST_SEEN:
            return True
        return rate.reused * self._all.seen >= MARGIN * self._all.reused * rate.seen


def _path_keys(node: Node) -> list[bytes]:
    parts = []
    step: Node | None = node
    while step is not None:
        parts.append(step.chain)
        step = step.parent
    chain = b"".join(reversed(parts))
    return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]
