"""GPUs that are not there: PyTorch's fake tensors, which have a device and a shape and no values.

Inside `FakeGpus.mode` a tensor "on cuda:1" goes through the same operations as a real one, and what
mixes devices is refused as a GPU would refuse it. So code runs as far as it asks for a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FakeGpus"]

FREE_BYTES = 10 << 30

# One for all tests: product code may keep a tensor, and those of two modes do not mix.
_MODE = FakeTensorMode(allow_non_fake_inputs=True)


class _CopiesBetweenDevices(TorchFunctionMode):
    """A copy from another device moves first: without a driver nothing else can do both at once."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and args[0].device != args[1].device:
            args = (args[0], args[1].to(args[0].device), *args[2:])
        return func(*args, **(kwargs or {}))


class FakeGpus:
    """`count` of them. `current`: devices that were made current, in order."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.current: list[torch.device] = []
        self.asked: list[torch.device] = []  # whose free memory was asked for
        cuda = torch.cuda
        patch.setattr(cuda, "is_available", lambda: True)
        patch.setattr(cuda, "device_count", lambda: count)
        patch.setattr(cuda, "synchronize", lambda _device=None: None)
        patch.setattr(cuda, "mem_get_info", self._memory)
        patch.setattr(cuda, "device", self._device)
        patch.setattr(fake_tensor, "init_gpu_context", lambda _device: None)

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Of this thread."""
        with _MODE, _CopiesBetweenDevices():
            yield

    def _memory(self, device: Any = None) -> tuple[int, int]:
        self.asked.append(torch.device(device))
        return FREE_BYTES, 2 * FREE_BYTES

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        self.current.append(torch.device(device))
        yield
