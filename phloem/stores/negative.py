"""Negative cache: keys not to ask for again for a short while."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["NegativeCache"]


class NegativeCache:
    """A bounded set of keys, each until a time of its own."""

    def __init__(self, max_keys: int = 65_536) -> None:
        self._max_keys = max_keys
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, key: bytes, until_s: float) -> None:
        """Do not ask for `key` before `until_s`."""
        self._until_s[key] = until_s
        self._until_s.move_to_end(key)
        while len(self._until_s) > self._max_keys:
            self._until_s.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """Ask for `key` again: it was stored."""
        self._until_s.pop(key, None)

    def has(self, key: bytes, now_s: float) -> bool:
        """Whether `key` is not to be asked for now."""
        until_s = self._until_s.get(key)
        if until_s is None:
            return False
        if until_s <= now_s:
            del self._until_s[key]
            return False
        return True
