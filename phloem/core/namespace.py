"""Namespaces: what may share cached pages with what.

A namespace is an opaque byte string made of type-tagged, length-prefixed parts, so that no two
different sets of parts give the same bytes (adapter "abc" is not salt "abc"; "a"+"bc" is not
"ab"+"c"; an empty salt is not an absent one).
"""

from __future__ import annotations

__all__ = ["make_namespace", "portable_part"]

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


def portable_part(namespace: bytes) -> bytes:
    """What of a namespace is the same in every process: adapter and salt.

    The model's path and the generation of its weights are left out: storage keys name the weights
    themselves, so a copy elsewhere shares. Raises ValueError for what `make_namespace` did not
    make.
    """
    out = bytearray()
    offset = 0
    while offset < len(namespace):
        end = offset + 5 + int.from_bytes(namespace[offset + 1 : offset + 5], "little")
        if namespace[offset] >= len(_ORDER) or end > len(namespace):
            raise ValueError("not a namespace")
        if _ORDER[namespace[offset]] not in ("model", "generation"):
            out += namespace[offset:end]
        offset = end
    return bytes(out)
