"""Namespaces: what may share cached pages with what.

A namespace is an opaque byte string made of type-tagged, length-prefixed parts, so that no two
different sets of parts give the same bytes (adapter "abc" is not salt "abc"; "a"+"bc" is not
"ab"+"c"; an empty salt is not an absent one).
"""

from __future__ import annotations

__all__ = ["make_namespace"]

_ORDER = ("model", "generation", "adapter", "salt")


def make_namespace(
    *, model: str, generation: int = 0, adapter: str | None = None, salt: str | None = None
) -> bytes:
    """The namespace of one model at one weights generation, for one adapter and one cache salt."""
    parts = {"model": model, "generation": str(generation), "adapter": adapter, "salt": salt}
    out = bytearray()
    for tag, name in enumerate(_ORDER):
        value = parts[name]
        if value is None:
            continue
        data = value.encode("utf-8", "surrogatepass")
        out.append(tag)
        out += len(data).to_bytes(4, "little")
        out += data
    return bytes(out)
