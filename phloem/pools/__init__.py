"""The tensors that hold pages."""

from __future__ import annotations

from phloem.pools.device import DevicePool

__all__ = ["DevicePool"]
