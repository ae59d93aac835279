"""Phloem itself, as a user starts it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from phloem.bench.compare.peer import Launch, ServerSpec

__all__ = ["PhloemServer"]

_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PhloemServer:
    """`dtype` "bf16" serves the folder; "q4" the GGUF file's blocks as they are.

    `host_memory`: a tier behind the device pool, where the other side has one too.
    """

    dtype: str = "bf16"
    host_memory: str | None = None

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
        if spec.storage is not None:
            flags += ["--storage", str(spec.storage)]
        argv = (
            *(sys.executable, "-m", "phloem.cli", "serve", str(model), "--port", str(port)),
            *("--page-size", str(_PAGE_TOKENS)),
            *("--num-pages", str(-(-spec.pool_tokens // _PAGE_TOKENS))),
            *("--max-model-len", str(spec.max_model_len)),
            *("--max-running", str(spec.max_running), "--threads", str(spec.threads)),
            *flags,
        )
        return Launch(argv=argv, ready_path="/readyz")
