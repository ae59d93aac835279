"""Ids of requests at the engine: a number that is never used twice, and the caller's own id."""

from __future__ import annotations

__all__ = ["engine_id", "public_id"]


def engine_id(serial: int, request_id: str) -> str:
    """The engine's id of a request: late output of an aborted one finds nobody."""
    return f"{serial}:{request_id}"


def public_id(name: str) -> str:
    """The id that its caller knows a request by."""
    return name.partition(":")[2]
