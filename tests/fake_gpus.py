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
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode

__all__ = ["FakeGpus"]

FREE_BYTES = 10 << 30


class _Mode(FakeTensorMode):
    avoid_device_init = True  # there is no device, whatever `torch.cuda` is made to say


# One for all tests: product code may keep a tensor, and those of two modes do not mix.
_MODE = _Mode(allow_non_fake_inputs=True)


def _indexed(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[Any]]:
    """The view that the numbers, slices and Nones of an index make, and its tensors by dim, if it
    has any."""
    parts = index if isinstance(index, tuple) else (index,)
    dims = [part for part in parts if part is not None and part is not Ellipsis]
    if len(dims) < tensor.dim() and not any(part is Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    view, dim = tensor, 0
    tensors: list[Any] = []
    for part in parts:
        kept = 0 if isinstance(part, int) else 1
        if part is Ellipsis:
            kept = tensor.dim() - len(dims)
        elif part is None:
            view = view.unsqueeze(dim)
        elif isinstance(part, slice):
            view = torch.ops.aten.slice.Tensor(view, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, int):
            view = torch.ops.aten.select.int(view, dim, part)
        tensors += [part if isinstance(part, torch.Tensor) else None] * kept
        dim += kept
    return view, tensors if any(each is not None for each in tensors) else []


class _WithoutDriver(TorchFunctionMode):
    """What a build without CUDA refuses to begin, by way of what it does not: indices are taken
    apart, a copy, which may be between any two devices, is a look at the shapes, and so is what is
    made of numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            return _copied(*args[:2])
        if func is torch.Tensor.__getitem__ and args[0].is_cuda:
            view, tensors = _indexed(*args)
            return torch.ops.aten.index.Tensor(view, tensors) if tensors else view
        if func is torch.Tensor.__setitem__ and args[0].is_cuda:
            view, tensors = _indexed(*args[:2])
            value = args[2] if isinstance(args[2], torch.Tensor) else view.new_full((), args[2])
            if tensors:
                return torch.ops.aten.index_put_.default(view, tensors, value)
            return _copied(view, value)
        if func is torch.Tensor.to and not args[0].is_cuda:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if device is not None and device.type == "cuda":
                return torch.empty(args[0].shape, dtype=dtype or args[0].dtype, device=device)
        if func is torch.tensor and kwargs.get("device"):
            device = kwargs.pop("device")
            here = func(*args, **kwargs)
            return torch.empty(here.shape, dtype=here.dtype, device=device)
        return func(*args, **kwargs)


def _copied(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    source.expand(to.shape)
    return to


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
        with _MODE, _WithoutDriver():
            yield

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Real tensors again, for what reads files."""
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            yield

    def _memory(self, device: Any = None) -> tuple[int, int]:
        self.asked.append(torch.device(device))
        return FREE_BYTES, 2 * FREE_BYTES

    @contextlib.contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        self.current.append(torch.device(device))
        yield
