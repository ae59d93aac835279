"""Sliding windows: what the cache must know of them, and their arithmetic.

W tokens, the token itself included; pages of P tokens. Positions from x on read state from
x - (W - 1) on, so whoever goes on after `l` pages needs the last T = ceil((W - 1) / P) of them in
the window component: the *tail* of l. (W <= P: one page; W = 1: none.)

    page    0 ................. l - T .......... l
    full    |-------------- alive --------------|
    window  |  alive or not     |---- alive ----|     then l is a valid length
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.core.errors import ConfigError

__all__ = ["WindowConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """The window component of a model and its pools.

    `tokens`: the window, the token itself included; `layers`: how many layers have it; `pages`: of
    each owner's device pool; `host_pages`: of the host arena for it; `checkpoint`: every so many
    pages a tail is kept for those who branch off before the end, 0: none.
    """

    tokens: int
    layers: int
    pages: tuple[int, ...]
    host_pages: int = 0
    checkpoint: int = 0

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("layers", 1), ("host_pages", 0), ("checkpoint", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"window {name} must be at least {least}, got {getattr(self, name)}"
                )
        if not self.pages or min(self.pages) < 1:
            raise ConfigError(f"every owner needs pages for windows, got {self.pages}")

    def tail_pages(self, page_size: int) -> int:
        """T: how many last pages of a prefix are read by what follows it."""
        return -(-(self.tokens - 1) // page_size)

    def deep_start(self, num_pages: int, page_size: int) -> int:
        """The last position, page-aligned, from which the tail of `num_pages` can be made anew.

        Of what lies before it there is no window state. That of the first window layer is right
        from there on, of each further one only W - 1 positions later: attention reaches back so
        far, over state that is wrong or missing.
        """
        tail = num_pages - self.tail_pages(page_size)
        start = tail * page_size - (self.layers - 1) * (self.tokens - 1)
        return max(0, start // page_size * page_size)
