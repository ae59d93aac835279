"""How many pages a memory budget holds."""

from __future__ import annotations

from phloem.core.errors import ConfigError
from phloem.kv.spec import KVSpec

__all__ = ["num_pages_for", "pages_for_tokens"]


def pages_for_tokens(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens, the last one perhaps in part."""
    return -(-num_tokens // page_size)


def num_pages_for(spec: KVSpec, budget_bytes: int) -> int:
    """Pages that fit in `budget_bytes`. Raises ConfigError if not even one does."""
    pages = budget_bytes // spec.page_bytes
    if pages < 1:
        raise ConfigError(
            f"{budget_bytes:,} bytes hold no KV page of {spec.page_bytes:,} bytes; "
            "raise --kv-memory or lower --page-size"
        )
    return pages
