"""The op table: `reference` (slow, obvious, fp32) and `torch` (PyTorch's fast kernels)."""

from __future__ import annotations

from phloem.core.errors import ConfigError
from phloem.kernels.buffer import KVBuffer
from phloem.kernels.codec import RowCodec, make_codec
from phloem.kernels.merge import add_sinks, merge_partials
from phloem.kernels.native_abi import CpuIsa, native_available
from phloem.kernels.native_proof import best_isa
from phloem.kernels.reference import ReferenceOps
from phloem.kernels.table import Ops, Scoring
from phloem.kernels.torch_ops import TorchOps, cpu_multiplies_bf16

__all__ = [
    "KVBuffer",
    "Ops",
    "ReferenceOps",
    "RowCodec",
    "Scoring",
    "TorchOps",
    "add_sinks",
    "cpu_kernels",
    "make_codec",
    "make_ops",
    "merge_partials",
]


def cpu_kernels() -> str:
    """What `--kernels auto` takes on this CPU for models that both can compute.

    PyTorch where native kernels are not built, or are plain C++ and the CPU multiplies bf16 (Arm):
    PyTorch uses that.
    """
    if not native_available() or (cpu_multiplies_bf16() and best_isa() is CpuIsa.PLAIN):
        return "torch"
    return "native"


def make_ops(name: str) -> Ops:
    """The op table of that name: "torch" or "reference"."""
    tables: dict[str, type[Ops]] = {"torch": TorchOps, "reference": ReferenceOps}
    if name not in tables:
        raise ConfigError(f"unknown ops {name!r}; known: {', '.join(sorted(tables))}")
    return tables[name]()
