"""Storage keys: what may share a page on disk, and what never."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem.core.errors import ConfigError
from phloem.core.namespace import make_namespace
from phloem.core.store import KEY_BYTES
from phloem.core.tokens import tokens_to_bytes
from phloem.kv.keys import (
    LINK_BYTES,
    KeyFacts,
    canonical,
    namespace_link,
    object_keys,
    page_links,
    scope_of,
    weights_identity,
)
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec

MODEL: dict[str, Any] = {"rope_theta": 1e4, "rope_scaling": None, "window": None, "eps": 1e-5}


def make_facts(groups: int = 1, pages: int = 10, spec: Any = None, **changes: Any) -> KeyFacts:
    sizes: dict[str, Any] = {
        "kind": AttentionKind.GQA,
        "dtype": KVDtype.BF16,
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 4,
    }
    facts: dict[str, Any] = {
        "weights": b"w" * 32,
        "weight_quantisation": "none",
        "model": MODEL,
        "layout": PageLayout(KVSpec(**(sizes | (spec or {}))), pages, groups),
        "namespace": make_namespace(model="m"),
    }
    return KeyFacts(**(facts | changes))


def _latent(width: int, rope_dim: int) -> dict[str, Any]:
    latent = {"kind": AttentionKind.MLA, "num_kv_heads": 1}
    return latent | {"head_dim": width, "rope_dim": rope_dim}


def test_o14_every_fact_that_changes_kv_or_its_bytes_changes_every_key() -> None:
    variants = [
        make_facts(),
        make_facts(weights=b"v" * 32),
        make_facts(weight_quantisation="int8"),
        make_facts(spec={"dtype": KVDtype.FP32}),
        *(make_facts(spec={"dtype": d}) for d in (KVDtype.INT8, KVDtype.FP8, KVDtype.FP4)),
        make_facts(spec=_latent(64, 16)),
        make_facts(spec=_latent(64, 32)),
        make_facts(spec=_latent(64, 16) | {"dtype": KVDtype.INT8}),
        make_facts(spec={"num_kv_heads": 1, "head_dim": 32}),  # as many bytes as a latent of 64
        make_facts(spec={"page_size": 8}),
        make_facts(spec={"num_layers": 5}),
        make_facts(spec={"num_kv_heads": 4}),
        make_facts(spec={"head_dim": 32}),
        make_facts(groups=2),
        make_facts(model=MODEL | {"rope_theta": 1e6}),
        make_facts(model=MODEL | {"rope_scaling": {"factor": 8.0}}),
        make_facts(model=MODEL | {"rope_scaling": {"factor": 8}}),
        make_facts(model=MODEL | {"window": 128}),
        make_facts(model=MODEL | {"eps": 1e-6}),
        make_facts(model=MODEL | {"new": None}),
        make_facts(namespace=make_namespace(model="m", salt="tenant")),
        make_facts(namespace=make_namespace(model="m", adapter="tenant")),
    ]
    tokens = tokens_to_bytes(list(range(64)))
    keys = [
        object_keys(page_links(namespace_link(f), tokens, f.layout.spec.page_size), scope)
        for f in variants
        for scope in (scope_of("full", 0), scope_of("full", 1), scope_of("window", 0))
    ]
    flat = list(itertools.chain.from_iterable(keys))
    assert len(set(flat)) == len(flat)
    assert {len(key) for key in flat} == {KEY_BYTES}


def test_keys_of_window_models_name_the_window_and_the_mix_of_layers() -> None:
    """Another W, another number of window layers, none at all: never a page of each other's, full
    or window, though sizes in bytes may be equal."""

    def window(tokens: int, layers: int = 2, pages: int = 10) -> PageLayout:
        layout = make_facts(spec={"num_layers": layers, "retention": tokens}).layout
        return PageLayout(layout.spec, pages, 1)

    facts = [
        make_facts(),
        make_facts(window=window(8)),
        make_facts(window=window(16)),
        make_facts(window=window(8, layers=3)),
        make_facts(window=window(8), spec={"num_layers": 5}),
        make_facts(window=window(8), spec={"num_layers": 0}),
    ]
    links = [namespace_link(each) for each in facts]
    assert len(set(links)) == len(links)
    assert namespace_link(make_facts(window=window(8, pages=99))) == links[1]


def test_what_does_not_change_kv_does_not_change_keys() -> None:
    """The pool's size, and the order in which a configuration was written down."""
    same = [
        make_facts(),
        make_facts(pages=999),
        make_facts(model=dict(reversed(MODEL.items()))),
    ]
    assert len({namespace_link(facts) for facts in same}) == 1


def test_a_link_names_all_tokens_before_it() -> None:
    root = namespace_link(make_facts())
    base = list(range(32))
    links = page_links(root, tokens_to_bytes(base), 4)
    assert len(links) == 8
    for position in range(32):
        other = page_links(root, tokens_to_bytes([*base[:position], 77, *base[position + 1 :]]), 4)
        same = [a == b for a, b in zip(links, other, strict=True)]
        assert same == [page < position // 4 for page in range(8)]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 11])
def test_only_full_pages_have_links(length: int) -> None:
    root = namespace_link(make_facts())
    assert len(page_links(root, tokens_to_bytes(list(range(length))), 4)) == length // 4


@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_a_chain_can_be_continued_from_any_link(cut: int) -> None:
    root = namespace_link(make_facts())
    tokens = tokens_to_bytes(list(range(100, 132)))
    whole = page_links(root, tokens, 4)
    head = page_links(root, tokens[: cut * 16], 4)
    last = head[-1] if head else root
    assert head + page_links(last, tokens[cut * 16 :], 4) == whole


def test_a_wrong_link_or_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="40 bytes"):
        page_links(b"short", b"", 4)
    with pytest.raises(ValueError, match="8 bytes"):
        object_keys([b"x" * LINK_BYTES], b"scope")


class Constant:
    """A SHA-256 that has been broken completely."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def digest(self) -> bytes:
        return b"\0" * 32


def test_o16_with_a_constant_hash_different_tokens_still_have_different_keys() -> None:
    """The fingerprint tells pages apart, also equal pages behind different prefixes."""
    keys = set()
    count = 0
    for facts in (make_facts(), make_facts(weights=b"v" * 32)):
        root = namespace_link(facts, Constant)
        assert root[:32] == bytes(32)
        for first in range(50):
            tokens = tokens_to_bytes([first, 1, 2, 3, *range(12)])
            keys.update(page_links(root, tokens, 4, Constant))
            count += 4
    assert len(keys) == count


_PRINT_KEYS = """
from tests.kv.test_keys import make_facts, namespace_link, object_keys, page_links, scope_of
from phloem.core.tokens import tokens_to_bytes
links = page_links(namespace_link(make_facts()), tokens_to_bytes(list(range(40))), 4)
print(object_keys(links, scope_of("full", 1))[-1].hex())
"""
# Written down on purpose: a change of this value makes every page on every disk unreachable.
KNOWN_KEY = (
    "51892ceb73a804c5839306daba404296b72b1110dc364dbba22b48a153e5b91a"
    "1603a608ae36c0d9c7ef109fad1bea51"
)


@pytest.mark.parametrize("hash_seed", ["unset", "0", "1", "4242", "random"])
def test_o15_keys_are_the_same_in_every_process(hash_seed: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed != "unset":
        env["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-c", _PRINT_KEYS]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KNOWN_KEY


def test_canonical_bytes_differ_where_facts_differ() -> None:
    """Types, borders between parts, nesting, empty and absent."""
    facts: list[Any] = [
        None,
        False,
        True,
        0,
        1,
        -1,
        10**30,
        0.0,
        1.0,
        -0.0,
        "",
        "1",
        b"",
        b"1",
        "n",
        [],
        [[]],
        [None],
        ["a", "b"],
        ["ab"],
        ["a", ["b"]],
        {},
        {"a": 1},
        {"a": 1.0},
        {"a": {"b": 1}},
        {"a": 1, "b": 2},
        ["a", 1],
        "\ud800",
    ]
    forms = [canonical(fact) for fact in facts]
    assert len(set(forms)) == len(forms)
    assert canonical(("a", "b")) == canonical(["a", "b"])
    assert canonical({"b": 2, "a": 1}) == canonical({"a": 1, "b": 2})


def test_a_fact_without_a_canonical_form_is_refused() -> None:
    for fact in ({1, 2}, object(), np.float32(1.0), {"a": {"b": {1}}}):
        with pytest.raises(TypeError, match="no canonical form"):
            canonical(fact)  # type: ignore[arg-type]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"model-{i}.safetensors" for i in range(3)]
    for path in paths:
        path.write_bytes(rng.bytes(3_000_000))
    return paths


def test_weights_are_known_by_content_not_by_name_place_or_order(
    shards: list[Path], tmp_path: Path
) -> None:
    identity = weights_identity(shards)
    copies = []
    for index, path in enumerate(shards):
        copy = tmp_path / "copy" / f"w{index}"
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copies.append(copy)
    assert weights_identity(copies[::-1]) == identity
    assert len(identity) == 32


@pytest.mark.parametrize("offset", [0, 1 << 20, 2 << 20, 3_000_000 - 1])
def test_weights_that_differ_in_one_sampled_block_differ(shards: list[Path], offset: int) -> None:
    identity = weights_identity(shards)
    data = bytearray(shards[1].read_bytes())
    data[offset] ^= 1
    shards[1].write_bytes(data)
    assert weights_identity(shards) != identity


def test_another_size_or_number_of_files_is_another_model(shards: list[Path]) -> None:
    identities = {weights_identity(shards), weights_identity(shards[:2])}
    with open(shards[0], "ab") as file:
        file.write(b"\0")
    identities.add(weights_identity(shards))
    assert len(identities) == 3


def test_weights_that_cannot_be_read_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read weights"):
        weights_identity([tmp_path / "missing"])
    with pytest.raises(ConfigError, match="no identity"):
        weights_identity([])


def test_a_page_costs_about_a_microsecond() -> None:
    """0.8 us here; the bound only catches something of another order."""
    root = namespace_link(make_facts())
    tokens = os.urandom(64 * 4096)
    best = 1.0
    for _ in range(10):
        start = time.perf_counter()
        page_links(root, tokens, 16)
        best = min(best, time.perf_counter() - start)
    assert best / 4096 < 4e-6
