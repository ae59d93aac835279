"""Requests on a cache with windows, as a scheduler runs them; and a hook that makes tombstones."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from phloem.cache import PrefixCache, Reservation, WindowConfig, check_invariants
from phloem.cache.components import ABSENT
from phloem.replica import window_commands
from tests.cache.build import NS

PLENTY = 4000


def make_windows(
    page_size: int = 4,
    *,
    window: int = 8,
    layers: int = 1,
    pages: int = PLENTY,
    window_pages: int = PLENTY,
    window_host_pages: int = 0,
    checkpoint: int = 0,
    num_owners: int = 1,
    **options: object,
) -> PrefixCache:
    """A cache of a model with window layers that records what it frees; pages are each owner's."""
    config = WindowConfig(
        tokens=window,
        layers=layers,
        pages=(window_pages,) * num_owners,
        host_pages=window_host_pages,
        checkpoint=checkpoint,
    )
    return PrefixCache(
        page_size=page_size,
        num_pages=(pages,) * num_owners,
        window=config,
        record_freed=True,
        **options,  # type: ignore[arg-type]
    )


def open_request(
    cache: PrefixCache, tokens: bytes, *, restart: bool = False, share: bool = True
) -> Reservation:
    """Admit a prompt; its last token is always computed."""
    num_tokens, size = len(tokens) // 4, cache.page_size
    match = cache.match(NS, tokens, max_pages=(num_tokens - 1) // size)
    pages = -(-num_tokens // size)
    return cache.reserve(match, pages - match.num_pages, restart=restart, share=share)


def compute(
    cache: PrefixCache,
    request: Reservation,
    tokens: bytes,
    start: int,
    *,
    chunk: int,
    check: bool = True,
) -> None:
    """Compute positions from `start` on, chunk by chunk, and commit each."""
    size, end = cache.page_size, len(tokens) // 4
    while start < end:
        stop = min(end, start + chunk)
        request.window_advance(start)
        request.extend(-(-stop // size) - request.num_pages)
        request.window_extend(-(-stop // size))
        request.commit(tokens[: 4 * stop])
        if check:
            check_invariants(cache)
        start = stop


def run(
    cache: PrefixCache,
    tokens: bytes,
    *,
    chunk: int = 16,
    restart: bool = False,
    output: bytes = b"",
    check: bool = True,
) -> int:
    """A whole request and its output, token by token; returns the position where it started."""
    with open_request(cache, tokens, restart=restart) as request:
        start = request.start
        compute(cache, request, tokens, start, chunk=chunk, check=check)
        whole = tokens + output
        compute(cache, request, whole, len(tokens) // 4, chunk=1, check=check)
    if check:
        check_invariants(cache)
    return start


def window_pages(cache: PrefixCache, tokens: bytes) -> list[int]:
    """The window component's refs of all known pages of a prompt, ABSENT where there is none."""
    page = 4 * cache.page_size
    node, pages, _ = cache.state.tree.find(NS, tokens, len(tokens) // page * page)
    out: list[int] = []
    while node is not cache.state.tree.root:
        out[:0] = node.extra[0].ref_list()[:pages]
        node = node.parent
        pages = node.num_pages
    return out


def alive(cache: PrefixCache, tokens: bytes) -> set[int]:
    """The pages that have window state on the device."""
    return {page for page, ref in enumerate(window_pages(cache, tokens)) if ref != ABSENT}


def valid_lengths(alive: set[int], num_pages: int, *, window: int, page_size: int) -> list[int]:
    """By the definition: full state is there, and every position that the next one reads."""
    return [
        length
        for length in range(num_pages + 1)
        if all(
            position // page_size in alive
            for position in range(max(0, length * page_size - (window - 1)), length * page_size)
        )
    ]


def tombstone(cache: PrefixCache, tokens: bytes, pages: Iterable[int]) -> None:
    """Evict the window state of these pages of a prompt, whatever the policy thinks of it."""
    ledger = cache.leader.window
    refs = window_pages(cache, tokens)
    gone = [refs[page] for page in pages]
    assert ABSENT not in gone
    for tail in ledger.tails.tails():
        if not set(gone).isdisjoint(tail.pages):
            ledger.tails._drop(tail)
    ledger.tails.gone(gone)
    cache.leader.log.append(window_commands.window_evict(array("q", gone).tobytes()))
