"""Small helpers of the cache tests: tokens, caches, and requests that are over in one call."""

from __future__ import annotations

from collections.abc import Sequence

from phloem.cache import PrefixCache, Reservation, check_invariants
from phloem.core.tokens import tokens_to_bytes

NS = b"model"


def toks(*parts: Sequence[int] | int) -> bytes:
    """Pack ints, and runs of ints."""
    ids: list[int] = []
    for part in parts:
        ids.extend([part] if isinstance(part, int) else part)
    return tokens_to_bytes(ids)


def run_of(first: int, count: int) -> bytes:
    """`count` tokens, `first` and up: a run like no other with another hundred."""
    return toks(range(first, first + count))


def make(page_size: int = 4, pages: int = 64, **options: object) -> PrefixCache:
    """A cache that records what it frees."""
    return PrefixCache(page_size=page_size, num_pages=(pages,), record_freed=True, **options)  # type: ignore[arg-type]


def start(
    cache: PrefixCache, tokens: bytes, *, namespace: bytes = NS, share: bool = True
) -> Reservation:
    """Admit a prompt as a scheduler does: the last token is always computed."""
    match = cache.match(namespace, tokens[:-4])
    pages = -(-len(tokens) // (4 * cache.page_size))
    return cache.reserve(match, pages - match.num_pages, share=share)


def serve(cache: PrefixCache, tokens: bytes, *, namespace: bytes = NS) -> int:
    """Run a whole request; returns how many of its tokens were cached."""
    with start(cache, tokens, namespace=namespace) as reservation:
        cached = reservation.num_cached_pages * cache.page_size
        reservation.commit(tokens)
    check_invariants(cache)
    return cached


def cached(cache: PrefixCache, tokens: bytes, namespace: bytes = NS) -> int:
    """How many first tokens are cached."""
    return cache.match(namespace, tokens).num_tokens
