"""How many pages a memory budget holds, and how many of them are of the window.

A request that runs needs the tail of its window and the pages of its current chunk; a cached
prefix needs a page of full state for every page of tokens, but window state only in the tail of
its end, and in that of every checkpoint. So the window's pool is a fraction of the full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phloem.core.errors import ConfigError
from phloem.kv.spec import KVSpec

__all__ = [
    "PoolDemand",
    "default_checkpoint",
    "least_window_pages",
    "num_pages_for",
    "pages_for_tokens",
    "pool_pages",
    "pool_pages_beside",
    "tail_pages",
    "window_chunk_pages",
]

# A cached prefix is taken to be this long where its end alone keeps a tail.
SESSION_TOKENS = 16384
# Checkpoints cost 1/8 of a full copy's window state, or less.
CHECKPOINT_WINDOWS = 8
LEAST_CHECKPOINT = 2048
# What runs may claim no more than this part of the memory before cached prefixes have theirs.
MOST_FOR_RUNNING = 0.25
# A chunk takes so many window pages whatever has to go for them, and more where nothing has to.
LEAST_CHUNK_TOKENS = 512
CHUNK_PARTS = 64  # of the pool
# Pages of a spine cost the worker nothing and the tree some hundred bytes each.
MOST_SPINE_PAGES = 64  # per window page


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDemand:
    """What two pools must be good for.

    `checkpoint`: tokens from one kept tail to the next; 0: only ends are kept. `ratio`: window
    pages per full page, instead of what follows from the rest.
    """

    max_model_len: int
    max_running: int
    max_prefill_tokens: int
    checkpoint: int = 0
    ratio: float | None = None


def pages_for_tokens(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // page_size)


def tail_pages(window: int, page_size: int) -> int:
    """Pages before a page border that the token right after it may read in a window layer."""
    return pages_for_tokens(window - 1, page_size)


def least_window_pages(window: int, page_size: int) -> int:
    """With fewer a request that runs alone could come to a halt."""
    return tail_pages(window, page_size) + 2


def window_chunk_pages(num_pages: int, page_size: int) -> int:
    """How many pages of a window pool a chunk may take from the tails of cached prefixes.

    A prompt passes through all of its pages, and only the last ones are worth keeping: chunks as
    long as a step allows would cost the tails of many others for nothing.
    """
    pages = max(pages_for_tokens(LEAST_CHUNK_TOKENS, page_size), num_pages // CHUNK_PARTS)
    return max(1, min(pages, num_pages // 4))


def default_checkpoint(window: int) -> int:
    """How many tokens lie between two checkpoints where nobody has said so."""
    return max(CHECKPOINT_WINDOWS * window, LEAST_CHECKPOINT)


def num_pages_for(spec: KVSpec, budget_bytes: int) -> int:
    """Pages that fit in `budget_bytes`. Raises ConfigError if not even one does."""
    pages = budget_bytes // spec.page_bytes
    if pages < 1:
        raise _too_small(budget_bytes, spec.page_bytes)
    return pages


def pool_pages(specs: Sequence[KVSpec], budget_bytes: int, demand: PoolDemand) -> tuple[int, ...]:
    """Pages of each component's pool, together at most `budget_bytes`. Raises ConfigError."""
    full = specs[0]
    if len(specs) == 1:
        return (num_pages_for(full, budget_bytes),)
    window = specs[1]
    if budget_bytes < full.page_bytes + window.page_bytes:
        raise _too_small(budget_bytes, full.page_bytes + window.page_bytes)
    if not full.page_bytes:
        pages = budget_bytes // window.page_bytes
        return _spine_pages(window, pages, demand), pages
    share = _share(window, demand)
    rest_bytes = budget_bytes - _reserve(window, demand) * window.page_bytes
    num_full = int(max(0, rest_bytes) // (full.page_bytes + share * window.page_bytes))
    num_window = (budget_bytes - num_full * full.page_bytes) // window.page_bytes
    least = _floor(window, demand)
    if demand.ratio is None:
        least = max(least, _running_pages(window, budget_bytes, demand))
    if num_window < least:
        num_full = (budget_bytes - least * window.page_bytes) // full.page_bytes
        num_window = least
    if num_window >= num_full:  # all layers might as well keep everything
        num_full = num_window = budget_bytes // (full.page_bytes + window.page_bytes)
    return num_full, num_window


def pool_pages_beside(
    specs: Sequence[KVSpec], num_pages: int, demand: PoolDemand
) -> tuple[int, ...]:
    """The same where the first pool has `num_pages` pages; of a spine they are the window's."""
    if len(specs) == 1:
        return (num_pages,)
    window = specs[1]
    if not specs[0].page_bytes:
        return _spine_pages(window, num_pages, demand), num_pages
    wanted = int(num_pages * _share(window, demand)) + _reserve(window, demand)
    if demand.ratio is None:
        bound = int(num_pages * MOST_FOR_RUNNING)
        wanted = max(wanted, min(bound, _running(window, demand)))
    return num_pages, min(num_pages, max(wanted, _floor(window, demand)))


def _share(window: KVSpec, demand: PoolDemand) -> float:
    """Window pages per full page."""
    if demand.ratio is not None:
        return demand.ratio
    # One more than the tail: a prompt of whole pages has two ends, of itself and of a repeat.
    tail = tail_pages(_retention(window), window.page_size) + 1
    apart = min(SESSION_TOKENS, demand.max_model_len, demand.checkpoint or SESSION_TOKENS)
    share = tail / pages_for_tokens(apart, window.page_size)
    return min(1.0, share * (1 + 2 / CHUNK_PARTS))  # one chunk in flight and one planned


def _reserve(window: KVSpec, demand: PoolDemand) -> int:
    """Pages of two chunks of the least size, beside the tails."""
    if demand.ratio is not None or not demand.max_prefill_tokens:
        return 0
    chunk = min(LEAST_CHUNK_TOKENS, demand.max_prefill_tokens, demand.max_model_len)
    return 2 * pages_for_tokens(chunk, window.page_size)


def _floor(window: KVSpec, demand: PoolDemand) -> int:
    longest = pages_for_tokens(demand.max_model_len, window.page_size)
    return max(1, min(longest, least_window_pages(_retention(window), window.page_size)))


def _running(window: KVSpec, demand: PoolDemand) -> int:
    """Pages that let every request run at once, with one step in flight and one planned."""
    tail = tail_pages(_retention(window), window.page_size)
    chunk = pages_for_tokens(min(demand.max_prefill_tokens, demand.max_model_len), window.page_size)
    return demand.max_running * (tail + 1) + 2 * chunk


def _running_pages(window: KVSpec, budget_bytes: int, demand: PoolDemand) -> int:
    bound = int(budget_bytes * MOST_FOR_RUNNING) // window.page_bytes
    return min(bound, _running(window, demand))


def _spine_pages(window: KVSpec, num_window: int, demand: PoolDemand) -> int:
    """Pages without bytes: enough for whatever the window's pages can be the ends of."""
    if num_window < _floor(window, demand):
        return num_window  # a longer request than they hold could come to a halt
    longest = pages_for_tokens(demand.max_model_len, window.page_size)
    if demand.ratio is not None:
        return max(num_window, int(num_window / demand.ratio))
    tail = max(1, tail_pages(_retention(window), window.page_size))
    cached = num_window * max(1, longest // tail)
    useful = max(cached, demand.max_running * longest)
    return max(longest, min(useful, MOST_SPINE_PAGES * num_window), num_window)


def _retention(window: KVSpec) -> int:
    assert window.retention is not None, "the second component is the window"
    return window.retention


def _too_small(budget_bytes: int, page_bytes: int) -> ConfigError:
    return ConfigError(
        f"{budget_bytes:,} bytes hold no KV page of {page_bytes:,} bytes; "
        "raise --kv-memory or lower --page-size"
    )
