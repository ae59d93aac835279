"""What stands in a segment file. All numbers little-endian, everything in blocks of 4096 bytes.

    0         4096                                                                        size
    | segment | frame            | frame                | free, or stale frames of a former   |
    | head    | head | p0 | p1 .. | head | p0 | p1 | ... | generation, never looked at         |

    A frame is one batch of objects: a head block with up to 63 entries (key, length, place, xxh3
    of the payload), then the payloads, each padded to a block. Frames follow each other without
    gaps; the first block that is not a head of *this* generation at *this* place ends the segment.

A segment is recycled in place: it gets a new random generation, so that what its former life left
behind is not a frame any more, wherever it lies. A frame is written by one call, head and payloads
together (the first one with the segment's head); when that was torn, the checksums tell.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from phloem.core.store import KEY_BYTES

__all__ = [
    "BLOCK",
    "MAX_ENTRIES",
    "Entry",
    "FrameHead",
    "SegmentHead",
    "pack_frame_head",
    "pack_segment_head",
    "padded",
    "unpack_frame_head",
    "unpack_segment_head",
]

BLOCK = 4096  # a multiple of every usual device's logical block
VERSION = 1

_SEGMENT = struct.Struct("<8sIIQQQQ")  # magic, version, 0, size, generation, sequence, seals
_SEGMENT_MAGIC = b"PHLMSEG\x00"
_FRAME = struct.Struct("<8sIIQQQ")  # magic, version, entries, generation, offset, frame bytes
_FRAME_MAGIC = b"PHLMFRM\x00"
_ENTRY = struct.Struct(f"<{KEY_BYTES}sIIQ")  # key, length, offset in the frame in blocks, xxh3
_DIGEST = struct.Struct("<Q")
_DIGEST_AT = BLOCK - _DIGEST.size  # xxh3 of the block before it

MAX_ENTRIES = (_DIGEST_AT - _FRAME.size) // _ENTRY.size


class SegmentHead(NamedTuple):
    """The first block of a segment. `sequence` grows from one taking of a segment to the next.

    `seals` is the generation of the segment that the same writer filled before, 0 if none: all
    frames of that one are complete. Of any other segment the last frame may be torn.
    """

    size_bytes: int
    generation: int
    sequence: int
    seals: int


class Entry(NamedTuple):
    """One object: where it lies in its segment, and what its bytes must hash to."""

    key: bytes
    length: int
    offset: int
    digest: int


class FrameHead(NamedTuple):
    """A batch: where it lies, and what is in it."""

    offset: int
    num_bytes: int
    entries: tuple[Entry, ...]


def padded(num_bytes: int) -> int:
    """Bytes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


def _close_block(block: bytearray) -> bytes:
    digest = xxhash.xxh3_64_intdigest(memoryview(block)[:_DIGEST_AT])
    _DIGEST.pack_into(block, _DIGEST_AT, digest)
    return bytes(block)


def _is_whole(block: bytes | memoryview) -> bool:
    if len(block) != BLOCK:
        return False
    (digest,) = _DIGEST.unpack_from(block, _DIGEST_AT)
    return bool(digest == xxhash.xxh3_64_intdigest(memoryview(block)[:_DIGEST_AT]))


def pack_segment_head(head: SegmentHead) -> bytes:
    """The head as one block."""
    block = bytearray(BLOCK)
    _SEGMENT.pack_into(block, 0, _SEGMENT_MAGIC, VERSION, 0, *head)
    return _close_block(block)


def unpack_segment_head(block: bytes | memoryview) -> SegmentHead | None:
    """The head in a block, or None if the block is anything else."""
    if len(block) != BLOCK or bytes(block[:8]) != _SEGMENT_MAGIC or not _is_whole(block):
        return None
    _, version, _, *head = _SEGMENT.unpack_from(block)
    return SegmentHead(*head) if version == VERSION else None


def pack_frame_head(generation: int, head: FrameHead) -> bytes:
    """The head as one block. At most MAX_ENTRIES entries, at offsets inside the frame."""
    assert 0 < len(head.entries) <= MAX_ENTRIES, f"{len(head.entries)} entries in a frame"
    block = bytearray(BLOCK)
    count = len(head.entries)
    _FRAME.pack_into(
        block, 0, _FRAME_MAGIC, VERSION, count, generation, head.offset, head.num_bytes
    )
    at = _FRAME.size
    for key, length, offset, digest in head.entries:
        _ENTRY.pack_into(block, at, key, length, (offset - head.offset) // BLOCK, digest)
        at += _ENTRY.size
    return _close_block(block)


def unpack_frame_head(
    block: bytes | memoryview, generation: int, offset: int, end: int
) -> FrameHead | None:
    """The head in the block that was read at `offset`, or None if no such frame begins there.

    A head is believed only if it is whole, of this generation, written for this place, and if all
    it names lies between itself and `end`.
    """
    if len(block) != BLOCK or bytes(block[:8]) != _FRAME_MAGIC or not _is_whole(block):
        return None
    _, version, count, its_generation, its_offset, num_bytes = _FRAME.unpack_from(block)
    if (version, its_generation, its_offset) != (VERSION, generation, offset):
        return None
    if not 0 < count <= MAX_ENTRIES or num_bytes % BLOCK or offset + num_bytes > end:
        return None
    entries = []
    for index in range(count):
        key, length, blocks, digest = _ENTRY.unpack_from(block, _FRAME.size + index * _ENTRY.size)
        start = blocks * BLOCK
        if start < BLOCK or start + padded(length) > num_bytes:
            return None
        entries.append(Entry(key, length, offset + start, digest))
    return FrameHead(offset, num_bytes, tuple(entries))
