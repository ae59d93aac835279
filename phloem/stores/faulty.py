"""A backend that misbehaves on purpose: the twin of every backend in tests.

Faults come from a script (the next call of a verb does this) or from a seeded draw with given
rates. A hung call ends when the test says so.
"""

from __future__ import annotations

import enum
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from phloem.core.store import Caps, Gone, Status, Verb
from phloem.stores.backend import Backend, Item, Usage

__all__ = ["Fault", "FaultyBackend"]


class Fault(enum.Enum):
    """What a call does instead of its duty."""

    NONE = "none"
    DROP = "drop"  # a put says OK and stores nothing; a get or probe says MISS
    DELAY = "delay"  # right, but late by delay_s
    CORRUPT = "corrupt"  # one bit of every second object is flipped, on its way in or out
    HALF = "half"  # the first half of the batch is done, the rest ERROR
    ERROR = "error"  # raises OSError
    HANG = "hang"  # does not return until `release`; then does its duty


class FaultyBackend:
    """Wraps a backend. Thread-safe; one seed gives one sequence of draws."""

    def __init__(
        self,
        inner: Backend,
        *,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        delay_s: float = 0.001,
    ) -> None:
        self.counters: Counter[Fault] = Counter()
        self._inner = inner
        self._random = random.Random(seed)
        self._rates = dict(rates or {})
        self._delay_s = delay_s
        self._scripts: dict[Verb, deque[Fault]] = {verb: deque() for verb in Verb}
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._never = threading.Event()

    @property
    def caps(self) -> Caps:
        return replace(self._inner.caps, verifies=False)

    def script(self, verb: Verb, *faults: Fault) -> None:
        """The next calls of `verb` do this, in order, before any draw."""
        with self._lock:
            self._scripts[verb].extend(faults)

    def set_rates(self, rates: Mapping[Fault, float]) -> None:
        """From now on draw faults with these probabilities per call."""
        with self._lock:
            self._rates = dict(rates)

    def release(self) -> None:
        """Let all hung calls go on; calls that hang later wait for the next release."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()

    def _draw(self, verb: Verb) -> Fault:
        with self._lock:
            fault = self._scripts[verb].popleft() if self._scripts[verb] else self._pick()
            self.counters[fault] += 1
            hang = self._released
        if fault is Fault.DELAY:
            self._never.wait(self._delay_s)
        elif fault is Fault.HANG:
            hang.wait()
        elif fault is Fault.ERROR:
            raise OSError(5, "injected")
        return fault

    def _pick(self) -> Fault:
        roll = self._random.random()
        for fault, rate in self._rates.items():
            roll -= rate
            if roll < 0:
                return fault
        return Fault.NONE

    def put(self, items: Sequence[Item]) -> list[Status]:
        fault = self._draw(Verb.PUT)
        if fault is Fault.DROP:
            return [Status.OK] * len(items)
        if fault is Fault.CORRUPT:
            return self._inner.put([_flipped(item, i) for i, item in enumerate(items)])
        done = items[: len(items) // 2] if fault is Fault.HALF else items
        return [*self._inner.put(done), *[Status.ERROR] * (len(items) - len(done))]

    def get(self, items: Sequence[Item]) -> list[Status]:
        fault = self._draw(Verb.GET)
        if fault is Fault.DROP:
            return [Status.MISS] * len(items)
        done = items[: len(items) // 2] if fault is Fault.HALF else items
        statuses = [*self._inner.get(done), *[Status.ERROR] * (len(items) - len(done))]
        if fault is Fault.CORRUPT:
            for index, item in enumerate(items):
                if index % 2 == 0 and item.parts and len(item.parts[0]):
                    item.parts[0][len(item.parts[0]) // 2] ^= 1
        return statuses

    def probe(self, keys: Sequence[bytes]) -> list[Status]:
        if self._draw(Verb.PROBE) is Fault.DROP:
            return [Status.MISS] * len(keys)
        return self._inner.probe(keys)

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        self._draw(Verb.DROP)
        return self._inner.drop(keys)

    def gone(self, under_way: Callable[[bytes], bool]) -> Gone:
        return self._inner.gone(under_way)

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()


def _flipped(item: Item, index: int) -> Item:
    if index % 2 or not item.parts or not len(item.parts[0]):
        return item
    first = bytearray(item.parts[0])
    first[len(first) // 2] ^= 1
    return Item(item.key, (memoryview(first), *item.parts[1:]))
