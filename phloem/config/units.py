"""Sizes as people write them: 4GB, 512MiB, 1.5g."""

from __future__ import annotations

import re

from phloem.core.errors import ConfigError

__all__ = ["format_bytes", "parse_bytes"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?")


def parse_bytes(text: str) -> int:
    """Bytes of "4GB" (powers of 1000), "4GiB" or "4g" (powers of 1024) or "4096"."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 4GB, 512MiB or 4096")
    number, prefix, binary = match.groups()
    base = 1000 if not binary and text.strip().lower().endswith("b") else 1024
    size = int(float(number) * base ** _POWERS[prefix])
    if size < 1:
        raise ConfigError(f"{text!r} is less than one byte")
    return size


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit that keeps it at least 1, e.g. 1.5 GiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
