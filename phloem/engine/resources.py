"""How much of this machine the process may use: memory and CPUs, with the limits of cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory_bytes", "default_kv_bytes", "usable_cpus"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_KV_SHARE = 0.25
_KV_CAP_BYTES = 4 << 30
_KV_UNKNOWN_BYTES = 1 << 30  # where the system does not say how much memory it has


def default_kv_bytes(available_bytes: int | None) -> int:
    """KV memory when the user names none: a quarter of what is available, at most 4 GiB."""
    if available_bytes is None:
        return _KV_UNKNOWN_BYTES
    return min(int(available_bytes * _KV_SHARE), _KV_CAP_BYTES)


def available_memory_bytes(
    *, meminfo: Path = Path("/proc/meminfo"), cgroup_root: Path = _CGROUP_ROOT
) -> int | None:
    """Memory this process could still take without swapping; None where nothing tells."""
    found = [
        *_meminfo_available(meminfo),
        *(room for folder in _cgroup_folders(cgroup_root) for room in _cgroup_room(folder)),
    ]
    return min(found, default=None)


def _meminfo_available(file: Path) -> Iterator[int]:
    for line in _lines(file):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """This process's cgroup and all above it: each of them may set a limit."""
    yield root
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # the unified hierarchy (v2)
            folder = root
            for part in Path(path).parts[1:]:
                folder = folder / part
                yield folder
        elif "memory" in controllers.split(","):
            yield root / "memory"
            yield root / "memory" / path.lstrip("/")


def _cgroup_room(folder: Path) -> Iterator[int]:
    """Limit - use + page cache that can be dropped, of cgroup v2 or v1."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            yield max(limit - used + _inactive_file(folder), 0)


def _inactive_file(folder: Path) -> int:
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def usable_cpus(*, cgroup_root: Path = _CGROUP_ROOT) -> int:
    """CPUs by affinity and by the cgroup's quota, at least one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [count or 1]
    for folder in _cgroup_folders(cgroup_root):
        for line in _lines(folder / "cpu.max"):
            quota, _, period = line.partition(" ")
            if quota != "max":
                limits.append(int(quota) // int(period))
    return max(min(limits), 1)


def _lines(file: Path) -> list[str]:
    """No lines where the file is absent: other systems and other cgroup versions lack it."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    """A count of bytes; None for "max" or an absent file."""
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].isdigit() else None
