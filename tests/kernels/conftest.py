"""A native context of every instruction set that this machine has, and of those it emulates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.native_build import emulated_library, native_library


def _isas() -> list[str]:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return ["plain"]
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    known = {
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": avx512,
        "avx512bf16": avx512 | {"avx512_bf16"},
        "amx": avx512 | {"amx_tile", "amx_bf16"},
    }
    return ["plain", *(isa for isa, needed in known.items() if needed <= set(flags))]


EMULATED = ("avx512bf16-emulated", "amx-emulated")


@pytest.fixture(params=[*_isas(), *EMULATED])
def kernels(request, monkeypatch):
    from phloem.kernels import native_abi
    from phloem.kernels.native import CpuIsa, NativeKernels

    isa, _, emulated = request.param.partition("-")
    if emulated:
        monkeypatch.setenv("PHLOEM_CPU_LIBRARY", str(emulated_library()))
        native_abi.library.cache_clear()
    else:
        native_library()
    context = NativeKernels(threads=2, isa=CpuIsa(isa))
    yield context
    context.close()
    if emulated:
        native_abi.library.cache_clear()
