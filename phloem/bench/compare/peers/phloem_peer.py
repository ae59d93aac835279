"""Phloem itself, as a user starts it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from phloem.bench.compare.peer import Launch, ServerSpec
from phloem.config.checkpoint import read_model_config

__all__ = ["PhloemServer"]

_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PhloemServer:
    """`dtype` "bf16" serves the folder; "q4" the GGUF file's blocks as they are.

    `host_memory`: a tier behind the device pool, where the other side has one too. `stage_tokens`:
    so much of the pool's memory is host memory instead, the stage to storage: no more in all.
    """

    dtype: str = "bf16"
    host_memory: str | None = None
    stage_tokens: int = 0

    @property
    def name(self) -> str:
        return "phloem" if self.dtype == "bf16" else f"phloem-{self.dtype}"

    def launch(self, spec: ServerSpec, port: int) -> Launch:
        quantised = self.dtype == "q4"
        model = spec.model.gguf if quantised and spec.model.gguf else spec.model.folder
        flags = ["--dtype", "bf16" if quantised else self.dtype]
        if quantised:
            flags += ["--quantization", "q4"]
        if self.host_memory is not None:
            flags += ["--host-memory", self.host_memory]
        stage_pages = self.stage_tokens // _PAGE_TOKENS
        if stage_pages:
            flags += ["--host-memory", str(stage_pages * _page_bytes(spec.model.folder))]
        if spec.storage is not None:
            flags += ["--storage", str(spec.storage)]
        argv = (
            *(sys.executable, "-m", "phloem.cli", "serve", str(model), "--port", str(port)),
            *("--page-size", str(_PAGE_TOKENS)),
            *("--num-pages", str(-(-spec.pool_tokens // _PAGE_TOKENS) - stage_pages)),
            *("--max-model-len", str(spec.max_model_len)),
            *("--max-running", str(spec.max_running), "--threads", str(spec.threads)),
            *flags,
        )
        return Launch(argv=argv, ready_path="/readyz")


def _page_bytes(folder: Path) -> int:
    """Of a bf16 page of the model."""
    from phloem.kv.spec import KVDtype
    from phloem.worker.pages import kv_specs  # brings torch

    specs = kv_specs(read_model_config(folder), dtype=KVDtype.BF16, page_size=_PAGE_TOKENS)
    return sum(spec.page_bytes for spec in specs)
