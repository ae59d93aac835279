"""The host arena: allocated once, shared by descriptor, its bytes as the layout says."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from phloem.core.errors import ConfigError
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import HostArena

SPEC = KVSpec(
    kind=AttentionKind.GQA,
    dtype=KVDtype.BF16,
    num_layers=3,
    num_kv_heads=4,
    head_dim=6,
    page_size=5,
)


def test_objects_lie_where_the_layout_says():
    arena = HostArena(PageLayout(SPEC, 7, 2))
    view = arena.arena().view
    for slot in range(7):
        arena.write_page(slot, bytes([slot]) * SPEC.page_bytes)
    for slot in range(7):
        for group in range(2):
            span = arena.span(slot, group)
            assert set(view[span.offset : span.offset + span.length]) == {slot}
    assert arena.span(0, 1).offset == SPEC.page_bytes // 2


def test_another_mapping_of_the_descriptor_is_the_same_memory():
    arena = HostArena(PageLayout(SPEC, 2, 2))
    other = mmap.mmap(arena.fd, 2 * SPEC.page_bytes)
    arena.write_page(1, b"x" * SPEC.page_bytes)
    assert other[SPEC.page_bytes :] == b"x" * SPEC.page_bytes
    other.close()


def test_poisoned_pages_are_nan_in_every_float_type():
    arena = HostArena(PageLayout(SPEC, 3, 2))
    arena.poison(np.array([1]))
    assert np.isnan(np.frombuffer(arena.read_page(1), dtype=np.float32)).all()
    assert not np.frombuffer(arena.read_page(0) + arena.read_page(2), dtype=np.uint8).any()


def test_memory_that_is_not_there_is_a_clear_error(monkeypatch):
    def no_memory(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(ConfigError, match="lower --host-memory"):
        HostArena(PageLayout(SPEC, 7, 2))


def test_a_closed_arena_gives_back_its_descriptor_and_may_be_closed_twice():
    arena = HostArena(PageLayout(SPEC, 1, 1))
    fd = arena.fd
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    arena.close()


def test_an_arena_that_is_forgotten_gives_back_its_descriptor():
    fd = HostArena(PageLayout(SPEC, 1, 1)).fd
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
