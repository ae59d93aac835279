"""The cost model: what a transfer takes, what computing takes, and which is cheaper.

Both are lines, seconds = fixed + per_unit x units, fitted to what was measured, the newest most.

    pages on the host:   0 ....... k ....... n        k loaded, the rest computed, both at once,
                         |-load-->|-compute->|        layer by layer: max(load(k), compute(rest))

Where layers have windows a prompt can be begun in several ways, each at another token and with
other pages to load: a shorter valid match, a restart lower down, a load of full pages and of a
tail. They are compared by the same rule. Transfers are measured in pages of the larger component.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phloem.core.transfer import TransferKind

__all__ = ["CostModel", "Forced", "Line", "LoadChoice", "Way"]

_FORGET = 0.95  # weight of all earlier measurements against a new one


class Line:
    """seconds = fixed + per_unit x units, by least squares over a fading past."""

    __slots__ = ("_n", "_t", "_x", "_xt", "_xx", "prior")

    def __init__(self, fixed: float, per_unit: float) -> None:
        self.prior = (fixed, per_unit)
        self._n = self._x = self._t = self._xx = self._xt = 0.0

    @property
    def measured(self) -> bool:
        return self._n > 0

    def observe(self, units: float, seconds: float) -> None:
        if units <= 0 or seconds <= 0:
            return  # nothing was measured
        self._n = self._n * _FORGET + 1
        self._x = self._x * _FORGET + units
        self._t = self._t * _FORGET + seconds
        self._xx = self._xx * _FORGET + units * units
        self._xt = self._xt * _FORGET + units * seconds

    @property
    def coefficients(self) -> tuple[float, float]:
        """(fixed, per_unit), neither of them negative; the prior before anything is measured."""
        if self._n == 0:
            return self.prior
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-9 * self._n * self._xx:  # one size only: it says nothing of a fixed part
            return 0.0, self._t / self._x
        slope = (self._n * self._xt - self._x * self._t) / spread
        fixed = (self._t - slope * self._x) / self._n
        if slope <= 0:
            return 0.0, self._t / self._x
        if fixed < 0:
            return 0.0, self._xt / self._xx
        return fixed, slope

    def seconds(self, units: float) -> float:
        if units <= 0:
            return 0.0
        fixed, per_unit = self.coefficients
        return fixed + per_unit * units


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """How many pages to load, and what was expected of it and of the two extremes."""

    pages: int
    chosen_s: float
    load_all_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to begin a prompt: the first token that is computed, and the pages to load first."""

    start: int
    full_pages: int = 0
    window_pages: int = 0

    @property
    def loads(self) -> bool:
        return self.full_pages + self.window_pages > 0


class Forced(enum.Enum):
    """A way that is taken whatever it costs: for comparisons."""

    LOAD = "load"
    RECOMPUTE = "recompute"


class CostModel:
    """Measured costs of the loop's machine; the leader's alone."""

    def __init__(self, *, page_bytes: int, page_size: int, window_page_bytes: int = 0) -> None:
        self._bytes = (page_bytes, window_page_bytes)  # by component
        page_bytes = self._page_bytes = max(self._bytes)
        self._page_size = page_size
        # Before the first measurement loading is taken to pay: 2 GB/s against 1,000 tokens/s.
        per_page = page_bytes / 2e9
        self.transfers = {kind: Line(0.0, per_page) for kind in TransferKind}
        self.prefill = Line(0.0, 1e-3)
        self.forced: Forced | None = None  # set by whoever compares the ways
        self.chosen = {"load": 0, "part": 0, "recompute": 0}

    def in_pages(self, component: int, num_pages: int) -> float:
        """Pages of a component as pages of the larger one."""
        return num_pages * self._bytes[component] / self._page_bytes

    def observe_transfer(self, kind: TransferKind, pages: float, seconds: float) -> None:
        """A transfer of `pages` pages (see `in_pages`) took `seconds`."""
        self.transfers[kind].observe(pages, seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds`, waiting for loads not counted."""
        self.prefill.observe(tokens, seconds)

    def bandwidth(self, kind: TransferKind) -> float:
        """Bytes a second of a long transfer; 0: not measured."""
        line = self.transfers[kind]
        per_page = line.coefficients[1]
        return self._page_bytes / per_page if line.measured and per_page > 0 else 0.0

    @property
    def prefill_rate(self) -> float:
        """Tokens a second of a long prefill; 0: not measured."""
        per_token = self.prefill.coefficients[1]
        return 1 / per_token if self.prefill.measured and per_token > 0 else 0.0

    def choose_load(self, num_pages: int, num_tokens: int) -> LoadChoice:
        """How many of `num_pages` host pages to load when `num_tokens` follow them.

        Loading and computing run at the same time, layer by layer, so the sooner of the two does
        not count. Load grows with k and compute falls, so the best k is where they cross.
        """
        load, size = self.transfers[TransferKind.LOAD_BACK], self._page_size

        def total_s(k: int) -> float:
            computed = num_tokens + (num_pages - k) * size
            return max(load.seconds(k), self.prefill.seconds(computed))

        if self.forced is not None:
            low = num_pages if self.forced is Forced.LOAD else 0
            return self._choice(low, num_pages, total_s)
        low, high = 0, num_pages
        while low < high:
            middle = (low + high + 1) // 2
            rest = num_tokens + (num_pages - middle) * size
            if load.seconds(middle) <= self.prefill.seconds(rest):
                low = middle
            else:
                high = middle - 1
        best = min({0, low, min(low + 1, num_pages)}, key=lambda k: (total_s(k), -k))
        return self._choice(best, num_pages, total_s)

    def seconds(self, way: Way, num_tokens: int) -> float:
        """What a prompt of `num_tokens` is expected to take that way."""
        pages = self.in_pages(0, way.full_pages) + self.in_pages(1, way.window_pages)
        load_s = self.transfers[TransferKind.LOAD_BACK].seconds(pages)
        return max(load_s, self.prefill.seconds(num_tokens - way.start))

    def choose_way(self, ways: Sequence[Way], num_tokens: int) -> Way:
        """The cheapest; of equals the one that computes, then the one that loads, least.

        One of `ways` loads nothing.
        """
        if self.forced is Forced.LOAD:
            return max(ways, key=lambda way: (way.start, -way.full_pages - way.window_pages))
        if self.forced is Forced.RECOMPUTE:
            return max((way for way in ways if not way.loads), key=lambda way: way.start)
        return min(
            ways,
            key=lambda way: (
                self.seconds(way, num_tokens),
                -way.start,
                way.full_pages + way.window_pages,
            ),
        )

    @staticmethod
    def _choice(pages: int, num_pages: int, total_s: Callable[[int], float]) -> LoadChoice:
        return LoadChoice(
            pages=pages,
            chosen_s=total_s(pages),
            load_all_s=total_s(num_pages),
            recompute_s=total_s(0),
        )

    def count(self, choice: LoadChoice, num_pages: int) -> None:
        """Remember which way a request went."""
        way = "load" if choice.pages == num_pages else "part" if choice.pages else "recompute"
        self.chosen[way] += 1
