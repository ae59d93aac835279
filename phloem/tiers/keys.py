"""Links: what a page is called in storage, the same in every process.

The namespace of a request carries a process-local generation of the weights; keys carry the
weights' identity instead, so what one process wrote another one of the same facts finds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import replace

from phloem.core.namespace import portable_part
from phloem.core.tokens import TOKEN_BYTES
from phloem.kv.keys import KeyFacts, namespace_link, page_links

__all__ = ["Links"]

_MAX_NAMESPACES = 4096
# A path is asked for again and again while its pages are written, a transfer at a time, and making
# its links takes 0.75 us a page.
_PATHS_REMEMBERED = 4


class Links:
    """Makes links; remembers the first one of each namespace."""

    def __init__(self, facts: KeyFacts, page_size: int) -> None:
        self._facts = facts
        self._page_size = page_size
        self._first: OrderedDict[bytes, bytes] = OrderedDict()
        self._paths: deque[tuple[bytes, bytes, list[bytes]]] = deque(maxlen=_PATHS_REMEMBERED)

    def of(self, namespace: bytes, tokens: bytes) -> list[bytes]:
        """One link for each full page of `tokens`, a prompt from its beginning."""
        page_bytes = self._page_size * TOKEN_BYTES
        tokens = tokens[: len(tokens) // page_bytes * page_bytes]
        links: list[bytes] = []
        for known, path, made in self._paths:
            if known != namespace:
                continue
            if path.startswith(tokens):
                return made[: len(tokens) // page_bytes]
            if len(made) > len(links) and tokens.startswith(path):
                links = made
        rest = tokens[len(links) * page_bytes :]
        if links:
            links = links + page_links(links[-1], rest, self._page_size)
        else:
            links = self._make(namespace, tokens)
        self._paths.append((namespace, tokens, links))
        return links.copy()

    def _make(self, namespace: bytes, tokens: bytes) -> list[bytes]:
        first = self._first.get(namespace)
        if first is None:
            facts = replace(self._facts, namespace=portable_part(namespace))
            first = self._first[namespace] = namespace_link(facts)
            while len(self._first) > _MAX_NAMESPACES:
                self._first.popitem(last=False)
        return page_links(first, tokens, self._page_size)
