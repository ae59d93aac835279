"""The directory of a segment store: how large it may be, who uses it, and its locks.

    DIR/phloem-store.json    geometry (segment size and number), one block at most
    DIR/phloem-store.lock    flock: exclusive while segments are created, recycled or removed
    DIR/phloem-store.users   flock: shared by every process that uses the directory
    DIR/phloem-store.dropped what was dropped; written under the first lock (droplog.py)
    DIR/segment-00000007.kv  flock: exclusive by its one writer

There are never more than `num_segments` segment files of `segment_bytes` each, so the bound holds
whoever writes, and whatever was there at start counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from phloem.core.errors import ConfigError
from phloem.stores.adapters.segment.droplog import LOG_BYTES
from phloem.stores.adapters.segment.format import BLOCK

__all__ = ["DirectoryBusy", "Geometry", "SegmentDirectory", "choose_geometry", "read_geometry"]

FORMAT = 1
# The geometry file, and the log of drops twice, as while it is written anew. Lock files are empty.
META_BYTES = BLOCK + 2 * LOG_BYTES
MIN_SEGMENTS = 4
# A compromise (docs/storage.md): large enough that taking one costs nothing, small against the
# whole so that eviction by segments is fine-grained.
SMALLEST_DEFAULT_SEGMENT = 16 << 20
LARGEST_DEFAULT_SEGMENT = 1 << 30
DEFAULT_NUM_SEGMENTS = 128
LOCK_WAIT_S = 1.0

_MARKER, _LOCK, _USERS = "phloem-store.json", "phloem-store.lock", "phloem-store.users"
_DROPPED = "phloem-store.dropped"
_SEGMENT_NAME = re.compile(r"segment-(\d{8})\.kv\Z")


class DirectoryBusy(Exception):
    """Another process holds the directory's lock too long (it may be stopped)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How the bytes of a directory are cut."""

    segment_bytes: int
    num_segments: int

    @property
    def max_object_bytes(self) -> int:
        """An object fits twice, so that a segment never holds one object and waste."""
        return (self.segment_bytes // 2 - 2 * BLOCK) // BLOCK * BLOCK


def choose_geometry(
    size_bytes: int, segment_bytes: int | None = None, before: Geometry | None = None
) -> Geometry:
    """Cut `size_bytes`; keeps the segment size of `before` (the data on disk) where that can be.

    Raises ConfigError if not even a few segments fit.
    """
    room = size_bytes - META_BYTES
    if segment_bytes is None and before and room // before.segment_bytes >= MIN_SEGMENTS:
        segment_bytes = before.segment_bytes
    if segment_bytes is None:
        wanted = max(size_bytes // DEFAULT_NUM_SEGMENTS, SMALLEST_DEFAULT_SEGMENT)
        segment_bytes = min(wanted, LARGEST_DEFAULT_SEGMENT, room // (2 * MIN_SEGMENTS))
    segment_bytes = segment_bytes // BLOCK * BLOCK
    if segment_bytes < 8 * BLOCK or room // segment_bytes < MIN_SEGMENTS:
        raise ConfigError(
            f"a storage directory of {size_bytes:,} bytes holds fewer than {MIN_SEGMENTS} segments "
            f"of {max(segment_bytes, 8 * BLOCK):,} bytes; raise --storage-size"
        )
    return Geometry(segment_bytes=segment_bytes, num_segments=room // segment_bytes)


def read_geometry(path: str) -> Geometry | None:
    """What the directory says of itself. Raises ConfigError for a format of another version."""
    try:
        with open(os.path.join(path, _MARKER), encoding="ascii") as file:
            data = json.load(file)
        if data["format"] != FORMAT:
            raise ConfigError(
                f"storage directory {path} has format {data['format']}, this version "
                f"reads {FORMAT}: use another directory, or remove it"
            )
        return Geometry(
            segment_bytes=int(data["segment_bytes"]), num_segments=int(data["num_segments"])
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None  # new, or damaged: then the segments are not believed either


class SegmentDirectory:
    """One process's hold on a storage directory. Thread-safe."""

    def __init__(self, path: str, size_bytes: int, segment_bytes: int | None = None) -> None:
        """Open or create. Raises ConfigError if it cannot be used, or not with this size now."""
        self.path = path
        self._threads = threading.Lock()
        try:
            os.makedirs(path, exist_ok=True)
            self._lock_fd = self._open_lock(_LOCK)
            self._users_fd = self._open_lock(_USERS)
        except OSError as error:
            raise ConfigError(f"cannot use storage directory {path}: {error.strerror}") from error
        try:
            with self.exclusive(wait_s=5.0):
                self.geometry = self._join(size_bytes, segment_bytes)
        except DirectoryBusy as error:
            self.close()
            raise ConfigError(
                f"storage directory {path} is locked by another process that does not answer"
            ) from error
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot use storage directory {path}: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise

    def _open_lock(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return os.open(os.path.join(self.path, name), flags, 0o600)

    @contextlib.contextmanager
    def exclusive(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Keep all other processes and threads from changing the set of segments.

        Raises DirectoryBusy after `wait_s`.
        """
        end = time.monotonic() + wait_s
        if not self._threads.acquire(timeout=wait_s):
            raise DirectoryBusy(self.path)
        try:
            while not try_flock(self._lock_fd):
                if time.monotonic() > end:
                    raise DirectoryBusy(self.path)
                time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def _join(self, size_bytes: int, segment_bytes: int | None) -> Geometry:
        """Agree with the processes that are here already, or lay the directory out anew."""
        before = read_geometry(self.path)
        wanted = choose_geometry(size_bytes, segment_bytes, before)
        if wanted != before:
            if not try_flock(self._users_fd):
                size = before.segment_bytes * before.num_segments + META_BYTES if before else 0
                raise ConfigError(
                    f"storage directory {self.path} is in use by another process with "
                    f"{size:,} bytes; use the same --storage-size, or stop that process"
                )
            keep = before is not None and before.segment_bytes == wanted.segment_bytes
            self._remove_surplus(wanted.num_segments if keep else 0)
            self._write_marker(wanted)
        else:
            self._remove_surplus(wanted.num_segments)
        fcntl.flock(self._users_fd, fcntl.LOCK_SH)
        return wanted

    def _write_marker(self, geometry: Geometry) -> None:
        path = os.path.join(self.path, _MARKER)
        with open(path + ".tmp", "w", encoding="ascii") as file:
            json.dump({"format": FORMAT} | asdict(geometry), file)
        os.replace(path + ".tmp", path)

    def _remove_surplus(self, num_kept: int) -> None:
        files = sorted(self.segments(), key=lambda index: self._age(index))
        for index in files[: max(0, len(files) - num_kept)]:
            self.remove(index)

    def _age(self, index: int) -> float:
        try:
            return os.stat(self.segment_path(index)).st_mtime
        except OSError:
            return 0.0

    def segment_path(self, index: int) -> str:
        return os.path.join(self.path, f"segment-{index:08d}.kv")

    @property
    def dropped_path(self) -> str:
        return os.path.join(self.path, _DROPPED)

    def segments(self) -> list[int]:
        """Indices of the segment files that exist."""
        matches = (_SEGMENT_NAME.match(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def remove(self, index: int) -> None:
        """Remove a segment file and give its blocks back even while others have it open."""
        path = self.segment_path(index)
        with contextlib.suppress(OSError):  # not ours to write: unlinking may still work
            os.truncate(path, 0)
        os.unlink(path)

    def clear(self) -> int:
        """Remove all segments; returns how many. Raises ConfigError if another process is here."""
        if not try_flock(self._users_fd):
            raise ConfigError(
                f"storage directory {self.path} is in use by another process; stop it, or clear "
                "it there (phloem cache clear --url)"
            )
        with self.exclusive(wait_s=5.0):
            indices = self.segments()
            for index in indices:
                self.remove(index)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.dropped_path)
        fcntl.flock(self._users_fd, fcntl.LOCK_SH)
        return len(indices)

    def close(self) -> None:
        """Let go of the locks."""
        for name in ("_lock_fd", "_users_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def try_flock(fd: int) -> bool:
    """Take an exclusive lock if nobody has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
