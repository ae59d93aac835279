"""The tensors that hold pages."""

from __future__ import annotations

from phloem.pools.device import DevicePool
from phloem.pools.host import HostArena

__all__ = ["DevicePool", "HostArena"]
