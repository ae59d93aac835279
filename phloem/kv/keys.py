"""Storage keys: which bytes on a disk may be taken for the KV of these tokens.

    facts of the engine --canonical--> SHA-256 = namespace digest, the chain's first link
    link i = SHA-256(link i-1, tokens of page i) + xxh3-64(link i-1, tokens of page i)   (40 bytes)
    object key = link i + scope (component, head group)                                  (48 bytes)

A link names its page and, by the chain, all tokens before it. The second, independent hash is the
page's token fingerprint: stores compare keys in full, so even a broken SHA-256 would not let one
page be taken for another. No Python `hash()`, no pickling, no dict order: the same facts and tokens
give the same keys in every process of every machine.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import xxhash

from phloem.core.errors import ConfigError
from phloem.core.store import KEY_BYTES
from phloem.core.tokens import TOKEN_BYTES
from phloem.kv.layout import ORDER, PageLayout

__all__ = [
    "LINK_BYTES",
    "KeyFacts",
    "canonical",
    "namespace_link",
    "object_keys",
    "page_links",
    "scope_of",
    "weights_identity",
]

LINK_BYTES = 40
SCOPE_BYTES = KEY_BYTES - LINK_BYTES
_FORMAT = "phloem-key-1"
_ROW_FORMAT = "codes-scales-1"  # of packed rows; another number where codes or scales mean another

Fact: TypeAlias = "bool | int | float | str | bytes | Sequence[Fact] | Mapping[str, Fact] | None"

# One block every MiB (at most 4096 a file) touches every tensor of a checkpoint that has more than
# a MiB, so a fine-tuned copy with the same sizes differs.
_SAMPLE_BYTES = 4096
_SAMPLE_STRIDE = 1 << 20
_MAX_SAMPLES = 4096


def canonical(fact: Fact) -> bytes:
    """Type-tagged, length-prefixed: different facts never give the same bytes.

    Mappings are ordered by key; True is not 1, 1 is not 1.0, "a" is not b"a". Raises TypeError for
    anything else.
    """
    if isinstance(fact, Mapping):
        parts = [canonical(key) + canonical(fact[key]) for key in sorted(fact)]
        return _tagged(b"m", b"".join(parts))
    if isinstance(fact, Sequence) and not isinstance(fact, str | bytes):
        return _tagged(b"l", b"".join(canonical(item) for item in fact))
    return _tagged(*_scalar(fact))


def _scalar(fact: Fact) -> tuple[bytes, bytes]:
    if fact is None:
        return b"n", b""
    if isinstance(fact, bool):
        return b"t", bytes([fact])
    if isinstance(fact, int):
        return b"i", str(fact).encode()
    if isinstance(fact, float):
        return b"f", struct.pack("<d", fact)
    if isinstance(fact, str):
        return b"s", fact.encode("utf-8", "surrogatepass")
    if isinstance(fact, bytes):
        return b"b", fact
    raise TypeError(f"no canonical form for {type(fact).__name__}")


def _tagged(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def weights_identity(paths: Sequence[str | os.PathLike[str]]) -> bytes:
    """32 bytes that name a checkpoint by its files' sizes and sampled blocks.

    Names and places of the files do not matter, so copies share; their order does not either.
    Costs about a thousandth of reading the files. Raises ConfigError if one cannot be read.
    """
    if not paths:
        raise ConfigError("a model without weight files has no identity to store pages under")
    try:
        return hashlib.sha256(canonical(sorted(_file_identity(path) for path in paths))).digest()
    except OSError as error:
        raise ConfigError(f"cannot read weights {error.filename}: {error.strerror}") from error


def _file_identity(path: str | os.PathLike[str]) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        stride = max(_SAMPLE_STRIDE, -(-size // _MAX_SAMPLES))
        for offset in [*range(0, size, stride), max(0, size - _SAMPLE_BYTES)]:
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFacts:
    """Everything that decides what KV the same tokens give, and how its bytes lie.

    `model`: the architecture's facts that change KV (RoPE, window, norm, activation, scaling ...),
    as plain values; what is not known to be irrelevant belongs in. `namespace`: who may share
    (adapter, salt; see `core.namespace`) - without a process-local generation number. `window`:
    the layout of the window component, of models that have one; a page's full state is computed
    from its window state, so the facts of both are in the keys of both.
    """

    weights: bytes
    weight_quantisation: str  # at run time: an int8 run of bf16 weights has other KV
    model: Mapping[str, Fact]
    layout: PageLayout
    namespace: bytes = b""
    window: PageLayout | None = None

    def as_fact(self) -> Fact:
        facts: dict[str, Fact] = {
            "format": _FORMAT,
            "weights": self.weights,
            "weight_quantisation": self.weight_quantisation,
            "model": self.model,
            "namespace": self.namespace,
            "kv": _layout_fact(self.layout),
        }
        if self.window is not None:
            facts["window_kv"] = {
                **_layout_fact(self.window),
                "retention": self.window.spec.retention,
            }
        return facts


def _layout_fact(layout: PageLayout) -> dict[str, Fact]:
    spec = layout.spec
    facts: dict[str, Fact] = {
        "kind": spec.kind.value,
        "dtype": spec.dtype.value,
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "page_size": spec.page_size,
        "num_head_groups": layout.num_head_groups,
        "axis_order": [axis.value for axis in ORDER],
    }
    if spec.rope_dim:
        facts["rope_dim"] = spec.rope_dim
    if spec.dtype.is_packed:
        facts["row"] = [_ROW_FORMAT, spec.row_bytes]
    return facts


class Digest(Protocol):
    """What hashlib's constructors return."""

    def digest(self) -> bytes: ...


Sha256: TypeAlias = Callable[[bytes], Digest]  # a parameter for the sake of tests only


def namespace_link(facts: KeyFacts, sha256: Sha256 = hashlib.sha256) -> bytes:
    """The chain's first link: no page yet."""
    data = canonical(facts.as_fact())
    return sha256(data).digest() + xxhash.xxh3_64_digest(data)


def page_links(
    link: bytes, tokens: bytes, page_size: int, sha256: Sha256 = hashlib.sha256
) -> list[bytes]:
    """The links of the full pages in `tokens`, which follow the page of `link`.

    `link` is the namespace's link for a prompt from its beginning, or the last known one to go on
    from there. `tokens` is packed (core.tokens); an open page at the end has no link.
    """
    if len(link) != LINK_BYTES:
        raise ValueError(f"a link has {LINK_BYTES} bytes, got {len(link)}")
    step = page_size * TOKEN_BYTES
    fingerprint = xxhash.xxh3_64_digest
    links: list[bytes] = []
    append = links.append
    for start in range(0, len(tokens) - step + 1, step):
        data = link + tokens[start : start + step]
        link = sha256(data).digest() + fingerprint(data)
        append(link)
    return links


def scope_of(component: str, head_group: int) -> bytes:
    """Which of a page's objects: one component's state of one head group."""
    return hashlib.sha256(canonical([component, head_group])).digest()[:SCOPE_BYTES]


def object_keys(links: Sequence[bytes], scope: bytes) -> list[bytes]:
    """Storage keys of one object per page. One chain serves all components and head groups."""
    if len(scope) != SCOPE_BYTES:
        raise ValueError(f"a scope has {SCOPE_BYTES} bytes, got {len(scope)}")
    return [link + scope for link in links]
