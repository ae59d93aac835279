"""Which rank owns the next pages of a chain."""

from __future__ import annotations

from typing import Protocol

__all__ = ["OneOwner", "PlacementPolicy"]


class PlacementPolicy(Protocol):
    """Maps pages of a chain, by their position, to owners on the shard axis."""

    def owners(self, first_page: int, num_pages: int) -> list[tuple[int, int]]:
        """(owner, pages) in order, for pages first_page ... first_page + num_pages - 1."""
        ...


class OneOwner:
    """Everything lives on one rank."""

    __slots__ = ("owner",)

    def __init__(self, owner: int = 0) -> None:
        self.owner = owner

    def owners(self, first_page: int, num_pages: int) -> list[tuple[int, int]]:  # noqa: ARG002
        return [(self.owner, num_pages)]
