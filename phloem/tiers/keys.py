"""Links: what a page is called in storage, the same in every process.

The namespace of a request carries a process-local generation of the weights; keys carry the
weights' identity instead, so what one process wrote another one of the same facts finds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from phloem.core.namespace import portable_part
from phloem.kv.keys import KeyFacts, namespace_link, page_links

__all__ = ["Links"]

_MAX_NAMESPACES = 4096


class Links:
    """Makes links; remembers the first one of each namespace."""

    def __init__(self, facts: KeyFacts, page_size: int) -> None:
        self._facts = facts
        self._page_size = page_size
        self._first: OrderedDict[bytes, bytes] = OrderedDict()

    def of(self, namespace: bytes, tokens: bytes) -> list[bytes]:
        """One link for each full page of `tokens`, a prompt from its beginning."""
        first = self._first.get(namespace)
        if first is None:
            facts = replace(self._facts, namespace=portable_part(namespace))
            first = self._first[namespace] = namespace_link(facts)
            while len(self._first) > _MAX_NAMESPACES:
                self._first.popitem(last=False)
        return page_links(first, tokens, self._page_size)
