"""The backend `segment`: the embedded store behind `--storage DIR` (docs/storage.md)."""

from phloem.core.errors import ConfigError
from phloem.stores.adapters.segment.store import SegmentBackend
from phloem.stores.backend import StoreOptions

__all__ = ["SegmentBackend", "build"]


def build(options: StoreOptions) -> SegmentBackend:
    """Open the directory `location`, bounded by `size_bytes`."""
    if not options.location:
        raise ConfigError("the segment store needs a directory (--storage DIR)")
    return SegmentBackend(options.location, options.size_bytes, sync=options.sync)
