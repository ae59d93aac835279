"""The C ABI of libphloem_cpu as ctypes sees it: structs, signatures, finding the library.

Mirrors csrc/cpu/phloem_cpu.h; `ABI_VERSION` must be the library's. Imports no torch.
"""

from __future__ import annotations

import ctypes as c
import enum
import functools
import logging
import os
from pathlib import Path

from phloem.core.errors import ConfigError

__all__ = [
    "ABI_VERSION",
    "PANEL",
    "AttentionArgs",
    "Batch",
    "CpuIsa",
    "Dtype",
    "Gate",
    "GemmArgs",
    "HeadsArgs",
    "KvLayer",
    "LatentArgs",
    "Layer",
    "LayerStep",
    "RopeArgs",
    "Weight",
    "WeightFormat",
    "check",
    "chosen_isa",
    "last_error",
    "library",
    "library_path",
    "native_available",
    "usable_cpus",
]

logger = logging.getLogger(__name__)

ABI_VERSION = 7
PANEL = 16  # output columns that are packed together
ISA_ENV = "PHLOEM_CPU_ISA"
LIBRARY_ENV = "PHLOEM_CPU_LIBRARY"
_PTR, _I32, _I64, _F32 = c.c_void_p, c.c_int32, c.c_int64, c.c_float


class Dtype(enum.IntEnum):
    """Element types of activations and pages; the last three of pages only."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    FP8 = 3
    FP4 = 4


class Gate(enum.IntEnum):
    """What a gated MLP does to its gate; NONE: an ordinary product."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


class WeightFormat(enum.IntEnum):
    """What a weight matrix is packed as: floats, or integers with GGUF's scales per 32 of them."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4


class CpuIsa(enum.Enum):
    """Instruction sets with kernels of their own; `auto` takes the best one that is proven."""

    AUTO = "auto"
    PLAIN = "plain"
    AVX2 = "avx2"
    AVX512 = "avx512"
    AVX512BF16 = "avx512bf16"
    AMX = "amx"


# Worst first.
ISA_NUMBERS = {
    CpuIsa.PLAIN: 0,
    CpuIsa.AVX2: 1,
    CpuIsa.AVX512: 2,
    CpuIsa.AVX512BF16: 3,
    CpuIsa.AMX: 4,
}


class Weight(c.Structure):
    _fields_ = (
        ("data", _PTR),
        ("bias", _PTR),
        ("n", _I64),
        ("k", _I64),
        ("format", _I32),
        ("reserved", _I32),
    )


class GemmArgs(c.Structure):
    _fields_ = (
        ("x", _PTR),
        ("y", _PTR),
        ("residual", _PTR),
        ("w", c.POINTER(Weight)),
        ("m", _I64),
        ("x_stride", _I64),
        ("y_stride", _I64),
        ("residual_stride", _I64),
        ("x_dtype", _I32),
        ("y_dtype", _I32),
        ("residual_dtype", _I32),
        ("gate", _I32),
    )


class KvLayer(c.Structure):
    _fields_ = (
        ("base", _PTR),
        ("page_stride", _I64),
        ("group_stride", _I64),
        ("kv_stride", _I64),
        ("token_stride", _I64),
        ("head_stride", _I64),
        ("num_pages", _I64),
        ("heads_per_group", _I32),
        ("page_size", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("dtype", _I32),
        ("value_dim", _I32),
        ("tail_dim", _I32),
        ("reserved", _I32),
    )


class Batch(c.Structure):
    _fields_ = (
        ("row_start", _PTR),
        ("positions", _PTR),
        ("tables", _PTR),
        ("base", _PTR),
        ("read_from", _PTR),
        ("write_from", _PTR),
        ("table_stride", _I64),
        ("num_rows", _I32),
        ("num_tokens", _I32),
    )


class AttentionArgs(c.Structure):
    _fields_ = (
        ("q", _PTR),
        ("out", _PTR),
        ("lse", _PTR),
        ("sinks", _PTR),
        ("q_stride", _I64),
        ("out_stride", _I64),
        ("q_dtype", _I32),
        ("out_dtype", _I32),
        ("num_heads", _I32),
        ("window", _I32),
        ("scale", _F32),
        ("softcap", _F32),
    )


class RopeArgs(c.Structure):
    _fields_ = (
        ("q", _PTR),
        ("k", _PTR),
        ("v", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("q_norm", _PTR),
        ("k_norm", _PTR),
        ("q_stride", _I64),
        ("k_stride", _I64),
        ("v_stride", _I64),
        ("max_position", _I64),
        ("dtype", _I32),
        ("num_heads", _I32),
        ("rotary_dim", _I32),
        ("norm_eps", _F32),
    )


class HeadsArgs(c.Structure):
    _fields_ = (
        ("x", _PTR),
        ("y", _PTR),
        ("w", c.POINTER(Weight)),
        ("w_head_bytes", _I64),
        ("m", _I64),
        ("x_stride", _I64),
        ("x_head", _I64),
        ("y_stride", _I64),
        ("y_head", _I64),
        ("num_heads", _I32),
        ("reserved", _I32),
    )


class LatentArgs(c.Structure):
    _fields_ = (
        ("q", _PTR),
        ("rows", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("norm", _PTR),
        ("q_stride", _I64),
        ("rows_stride", _I64),
        ("max_position", _I64),
        ("kept", _PTR),
        ("num_heads", _I32),
        ("q_dim", _I32),
        ("rotary_dim", _I32),
        ("norm_eps", _F32),
    )


class Layer(c.Structure):
    _fields_ = (
        ("attn_norm", _PTR),
        ("mlp_norm", _PTR),
        ("post_attn_norm", _PTR),
        ("post_mlp_norm", _PTR),
        ("q_norm", _PTR),
        ("k_norm", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("sinks", _PTR),
        ("qkv", Weight),
        ("o", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("max_position", _I64),
        ("hidden", _I32),
        ("num_heads", _I32),
        ("rotary_dim", _I32),
        ("window", _I32),
        ("norm_eps", _F32),
        ("scale", _F32),
        ("softcap", _F32),
        ("gate", _I32),
    )


class LayerStep(c.Structure):
    _fields_ = (
        ("layer", c.POINTER(Layer)),
        ("kv", c.POINTER(KvLayer)),
        ("component", _I32),
        ("reserved", _I32),
    )


_KV, _BATCH = c.POINTER(KvLayer), c.POINTER(Batch)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "phloem_abi_version": (_I32, ()),
    "phloem_last_error": (c.c_char_p, ()),
    "phloem_best_isa": (_I32, ()),
    "phloem_isa_supported": (_I32, (_I32,)),
    "phloem_self_test": (_I32, (_I32,)),
    "phloem_ctx_create": (_PTR, (_I32, _I32)),
    "phloem_ctx_destroy": (None, (_PTR,)),
    "phloem_ctx_num_threads": (_I32, (_PTR,)),
    "phloem_ctx_isa": (_I32, (_PTR,)),
    "phloem_ctx_workspace_bytes": (_I64, (_PTR,)),
    "phloem_ctx_workspace_grows": (_I64, (_PTR,)),
    "phloem_packed_bytes": (_I64, (_I32, _I64, _I64)),
    "phloem_pack_weight": (_I32, (_I32, _PTR, _I32, _I64, _I64, _I64, _PTR)),
    "phloem_pack_gate_up": (_I32, (_I32, _PTR, _PTR, _I32, _I64, _I64, _I64, _PTR)),
    "phloem_pack_blocks": (_I32, (_I32, _PTR, _I64, _I64, _PTR)),
    "phloem_gemm": (_I32, (_PTR, c.POINTER(GemmArgs))),
    "phloem_rmsnorm": (_I32, (_PTR, _PTR, _PTR, _PTR, _PTR, _I32, _I64, _I64, _F32)),
    "phloem_silu_mul": (_I32, (_PTR, _PTR, _PTR, _PTR, _I32, _I64, _I64, _I64)),
    "phloem_embedding": (_I32, (_PTR, _PTR, c.POINTER(Weight), _PTR, _I32, _I64)),
    "phloem_check_batch": (_I32, (_KV, _BATCH, _I32, _I64)),
    "phloem_rope_kv_write": (_I32, (_PTR, c.POINTER(RopeArgs), _KV, _BATCH)),
    "phloem_heads_gemm": (_I32, (_PTR, c.POINTER(HeadsArgs))),
    "phloem_latent_write": (_I32, (_PTR, c.POINTER(LatentArgs), _KV, _BATCH)),
    "phloem_attention": (_I32, (_PTR, c.POINTER(AttentionArgs), _KV, _BATCH)),
    "phloem_layer_forward": (_I32, (_PTR, c.POINTER(Layer), _KV, _BATCH, _PTR, _I32)),
    "phloem_layers_forward": (
        _I32,
        (_PTR, c.POINTER(LayerStep), _I32, c.POINTER(_BATCH), _I32, _PTR, _I32),
    ),
    "phloem_layer_project": (_I32, (_PTR, c.POINTER(Layer), _KV, _BATCH, _PTR, _I32, _PTR)),
    "phloem_layer_finish": (_I32, (_PTR, c.POINTER(Layer), _KV, _BATCH, _PTR, _I32, _PTR)),
    "phloem_layer_output": (_I32, (_PTR, c.POINTER(Layer), _KV, _BATCH, _PTR, _I32, _PTR)),
    "phloem_argmax": (_I32, (_PTR, _PTR, _I32, _I64, _I64, _I64, _PTR)),
    "phloem_top_k": (_I32, (_PTR, _PTR, _I32, _I64, _I64, _PTR, _PTR, _PTR)),
    "phloem_copy_pages": (_I32, (_PTR, _PTR, _PTR, _PTR, _PTR, _I64, _I64)),
}


def library_path() -> Path | None:
    """Where the library is: PHLOEM_CPU_LIBRARY, in the package, or in a checkout's build folder."""
    override = os.environ.get(LIBRARY_ENV)
    if override:
        return Path(override)
    here = Path(__file__).resolve()
    name = "libphloem_cpu.so"
    for path in (here.parent / "_native" / name, here.parents[2] / "build" / "csrc" / name):
        if path.is_file():
            return path
    return None


@functools.cache
def library() -> c.CDLL:
    """The loaded library. Raises ConfigError if it was not built or is of another version."""
    path = library_path()
    if path is None:
        raise ConfigError(
            "the native CPU kernels are not built; run: cmake -S csrc -B build/csrc && "
            "cmake --build build/csrc"
        )
    try:
        lib = c.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"cannot load the native CPU kernels: {error}") from error
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise ConfigError(f"{path} is not this version's library: {error}") from error
    if lib.phloem_abi_version() != ABI_VERSION:
        raise ConfigError(f"{path} has ABI {lib.phloem_abi_version()}, wanted {ABI_VERSION}")
    return lib


def check(code: int) -> int:
    """`code` unless it is an error. Raises ValueError for arguments, MemoryError for memory."""
    if code >= 0:
        return code
    if code == -1:
        raise ValueError(last_error())
    raise MemoryError(last_error())


def last_error() -> str:
    """What went wrong in the last call of this thread."""
    text: bytes = library().phloem_last_error()
    return text.decode()


def chosen_isa() -> CpuIsa:
    """What PHLOEM_CPU_ISA asks for. Raises ConfigError for a value that is none of them."""
    value = os.environ.get(ISA_ENV, CpuIsa.AUTO.value)
    try:
        return CpuIsa(value)
    except ValueError:
        known = ", ".join(isa.value for isa in CpuIsa)
        raise ConfigError(f"{ISA_ENV}={value!r}; known: {known}") from None


def native_available() -> bool:
    """Whether the library can be loaded here."""
    try:
        library()
    except ConfigError as error:
        if library_path() is not None:  # one that is of no use is slower without a word
            _warn(f"{error}; it is not used until it is built again: make install")
        return False
    return True


@functools.cache
def _warn(message: str) -> None:
    """Once a process."""
    logger.warning(message)


def usable_cpus() -> int:
    """CPUs that affinity and the cgroup's quota leave to this process, at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
