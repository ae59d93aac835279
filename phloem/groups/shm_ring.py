"""Chunks in shared memory: each rank owns two slots that all others read.

    written[s]       chunks that rank s has published          one writer each: rank s
    taken[s][d]      chunks of rank s that rank d is done with                  rank d
    sleeping[r]      see bells.py                                               rank r
    begun[r][i]      (serial + 1, digest) of operation i mod 64                 rank r
    slot[s][0..1]    header, then bytes; chunk n of rank s is in slot n mod 2

A slot is written again when all others have taken what was in it: while one is read the other is
filled. The header says which operation the chunk belongs to and which part is for whom.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from dataclasses import dataclass

__all__ = ["CHUNK_BYTES", "NUM_SLOTS", "Header", "Ring"]

CHUNK_BYTES = 1 << 18
NUM_SLOTS = 2
_REMEMBERED = 64
_ALIGN = 64
_FIXED = struct.Struct("<QQQ")  # serial, digest, last
_PART = struct.Struct("<QQ")  # offset, bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a reader learns about a chunk: the operation, and its own part."""

    serial: int
    digest: int
    last: bool  # of this operation
    offset: int
    num_bytes: int


class Ring:
    """One rank's mapping. Owns neither operations nor waiting."""

    def __init__(self, mapping: mmap.mmap, *, rank: int, size: int, chunk_bytes: int) -> None:
        """Takes over the mapping of `file_bytes`."""
        self.chunk_bytes = chunk_bytes
        self._rank = rank
        self._others = tuple(r for r in range(size) if r != rank)
        self._map = mapping
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._anchor)
        self._view = memoryview(self._map)
        self._words = self._view[: self._control_bytes(size)].cast("Q")
        words = self._words
        at = 0
        self.written = words[at : at + size]
        at += size
        self._taken = [words[at + s * size : at + (s + 1) * size] for s in range(size)]
        at += size * size
        self.sleeping = words[at : at + size]
        at += size
        width = 2 * _REMEMBERED
        self._begun = [words[at + r * width : at + (r + 1) * width] for r in range(size)]
        self._header_bytes = self._header_size(size)
        slot_bytes = self._header_bytes + chunk_bytes
        start = self._control_bytes(size)
        self._slots = [
            [start + (s * NUM_SLOTS + i) * slot_bytes for i in range(NUM_SLOTS)]
            for s in range(size)
        ]

    @staticmethod
    def _control_bytes(size: int) -> int:
        words = size + size * size + size + size * 2 * _REMEMBERED
        return -(-words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE

    @staticmethod
    def _header_size(size: int) -> int:
        return -(-(_FIXED.size + size * _PART.size) // _ALIGN) * _ALIGN

    @classmethod
    def file_bytes(cls, size: int, chunk_bytes: int) -> int:
        """How large the memory is."""
        return cls._control_bytes(size) + size * NUM_SLOTS * (cls._header_size(size) + chunk_bytes)

    # -- writing

    def may_write(self) -> bool:
        """Have all others taken what stands in this rank's next slot?"""
        oldest = self.written[self._rank] - NUM_SLOTS + 1
        taken = self._taken[self._rank]
        return all(taken[d] >= oldest for d in self._others)

    def slowest(self) -> tuple[int, ...]:
        """Whom `may_write` waits for."""
        oldest = self.written[self._rank] - NUM_SLOTS + 1
        taken = self._taken[self._rank]
        return tuple(d for d in self._others if taken[d] < oldest)

    def put(self, offset: int, source: int, num_bytes: int) -> None:
        """Copy bytes at the address `source` into the next slot."""
        slot = self._slots[self._rank][self.written[self._rank] % NUM_SLOTS]
        ctypes.memmove(self._base + slot + self._header_bytes + offset, source, num_bytes)

    def publish(
        self, serial: int, digest: int, parts: list[tuple[int, int]], *, last: bool
    ) -> None:
        """Show the next slot to all; `parts[d]` is (offset, bytes) for rank d."""
        slot = self._slots[self._rank][self.written[self._rank] % NUM_SLOTS]
        _FIXED.pack_into(self._map, slot, serial, digest, last)
        at = slot + _FIXED.size
        for part in parts:
            _PART.pack_into(self._map, at, *part)
            at += _PART.size
        self.written[self._rank] += 1

    # -- reading

    def has(self, source: int) -> bool:
        """Is there a chunk of `source` that this rank has not taken?"""
        return self.written[source] > self._taken[source][self._rank]

    def head(self, source: int) -> Header:
        """The oldest such chunk."""
        slot = self._slots[source][self._taken[source][self._rank] % NUM_SLOTS]
        serial, digest, last = _FIXED.unpack_from(self._map, slot)
        at = slot + _FIXED.size + self._rank * _PART.size
        return Header(serial, digest, bool(last), *_PART.unpack_from(self._map, at))

    def get(self, source: int, header: Header, target: int) -> None:
        """Copy this rank's part of the oldest chunk to the address `target`."""
        slot = self._slots[source][self._taken[source][self._rank] % NUM_SLOTS]
        at = self._base + slot + self._header_bytes + header.offset
        ctypes.memmove(target, at, header.num_bytes)

    def take(self, source: int) -> None:
        """Done with the oldest chunk."""
        self._taken[source][self._rank] += 1

    # -- the trail of operations

    def note(self, serial: int, digest: int) -> None:
        """This rank has begun an operation."""
        row, at = self._begun[self._rank], serial % _REMEMBERED * 2
        row[at] = 0  # a reader in between sees no operation rather than half of one
        row[at + 1] = digest
        row[at] = serial + 1

    def digest_of(self, rank: int, serial: int) -> int | None:
        """The digest of a rank's operation, if it has begun it and not long ago."""
        row, at = self._begun[rank], serial % _REMEMBERED * 2
        return row[at + 1] if row[at] == serial + 1 else None

    def close(self) -> None:
        """Unmap. Nothing of the ring may be used afterwards. Idempotent."""
        if self._map.closed:
            return
        for view in (self.written, self.sleeping, *self._taken, *self._begun):
            view.release()
        self._words.release()
        self._view.release()
        del self._anchor
        self._map.close()
