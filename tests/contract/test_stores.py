"""The store contract over every backend, and over their guarded faulty twins."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phloem.stores import Backend
from phloem.stores.adapters.memory import MemoryBackend
from phloem.stores.adapters.segment import SegmentBackend
from phloem.stores.faulty import FaultyBackend
from tests.contract.store_contract import SIZE_BYTES, PersistentContract, StoreContract

TMPFS = "/dev/shm"
needs_tmpfs = pytest.mark.skipif(not os.path.isdir(TMPFS), reason="no tmpfs here")


class TestMemory(StoreContract):
    def backend(self) -> Backend:
        return MemoryBackend(SIZE_BYTES)


class TestFaultyTwinOfMemory(StoreContract):
    """Without a fault drawn the twin is as good as the original."""

    def backend(self) -> Backend:
        return FaultyBackend(MemoryBackend(SIZE_BYTES))


class TestSegment(StoreContract, PersistentContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = str(tmp_path / "store")

    def backend(self) -> Backend:
        return SegmentBackend(self.place, SIZE_BYTES)


class TestSegmentSynced(TestSegment):
    def backend(self) -> Backend:
        return SegmentBackend(self.place, SIZE_BYTES, sync=True)


class TestFaultyTwinOfSegment(TestSegment):
    def backend(self) -> Backend:
        return FaultyBackend(SegmentBackend(self.place, SIZE_BYTES))


@needs_tmpfs
class TestSegmentOnTmpfs(StoreContract, PersistentContract):
    """Where O_DIRECT may not exist."""

    @pytest.fixture(autouse=True)
    def _place(self) -> Iterator[None]:
        self.place = tempfile.mkdtemp(dir=TMPFS)
        yield
        shutil.rmtree(self.place)

    def backend(self) -> Backend:
        return SegmentBackend(self.place, SIZE_BYTES)
