"""A native context of every instruction set that this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.native_build import native_library


def _isas() -> list[str]:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return ["plain"]
    known = {"avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw", "avx512vl"}}
    return ["plain", *(isa for isa, needed in known.items() if needed <= set(flags))]


@pytest.fixture(params=_isas())
def kernels(request):
    from phloem.kernels.native import CpuIsa, NativeKernels

    native_library()
    context = NativeKernels(threads=2, isa=CpuIsa(request.param))
    yield context
    context.close()
