"""Typed values out of a parsed `config.json`; what has another type is a ConfigError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phloem.core.errors import ConfigError

__all__ = ["Json", "as_int", "need_float", "need_int", "positive", "token_ids"]

Json = Mapping[str, Any]


def as_int(name: str, value: object) -> int:
    """`value`, if it is an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} in config.json must be an integer, got {value!r}")
    return value


def need_int(raw: Json, name: str, default: int | None = None) -> int:
    """An integer that must be there, unless there is a default."""
    value = raw.get(name, default)
    if value is None and name not in raw:
        raise ConfigError(f"config.json has no {name}")
    return as_int(name, value)


def need_float(raw: Json, name: str, default: float | None) -> float:
    """A number; with no default it must be there."""
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} in config.json must be a number, got {value!r}")
    return float(value)


def positive(raw: Json, name: str) -> float | None:
    """A positive number, or None where it is null or absent."""
    if raw.get(name) is None:
        return None
    value = need_float(raw, name, None)
    if not value > 0:
        raise ConfigError(f"{name} in config.json must be positive, got {value!r}")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of ids, or none."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(as_int("a token id", item) for item in values)
