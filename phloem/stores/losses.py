"""A bounded memory of what a backend has lost, until somebody asks."""

from __future__ import annotations

from collections.abc import Callable

from phloem.core.store import Gone

__all__ = ["Losses"]

# Several segments full of objects of 64 KiB; some MiB of memory.
MAX_KEYS = 1 << 15


class Losses:
    """Keys in the order of their loss, each once. Not thread-safe."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[bytes, None] = {}
        self._overflowed = False

    def add(self, key: bytes) -> None:
        """Remember it, and forget the oldest if there are too many."""
        self._keys[key] = None
        if len(self._keys) > self._max_keys:
            del self._keys[next(iter(self._keys))]
            self._overflowed = True

    def take(self, is_there: Callable[[bytes], bool], under_way: Callable[[bytes], bool]) -> Gone:
        """All but those that have come back; keeps those that are under way, forgets the rest."""
        if not self._keys and not self._overflowed:
            return Gone()
        lost = [key for key in self._keys if not is_there(key)]
        self._keys = {key: None for key in lost if under_way(key)}
        gone = Gone(tuple(key for key in lost if key not in self._keys), self._overflowed)
        self._overflowed = False
        return gone
