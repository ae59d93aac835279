"""llama.cpp's own server, inside the Python package that carries it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phloem.bench.compare.environment import Environment
from phloem.bench.compare.peer import Launch, PeerUnavailable, Say, ServerSpec

__all__ = ["LlamaCpp"]

_VERSION = "2026.10.11549"
_SCRIPT = Path(__file__).parent.parent / "inside" / "serve_llama_cpp.py"


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """PyPI's `xllamacpp`: prebuilt for AVX2, so machines with AVX-512 could do better."""

    cache: Path
    name: str = "llama.cpp"
    key: str = "llama_cpp"
    dtypes: tuple[str, ...] = ("q4",)

    @property
    def environment(self) -> Environment:
        return Environment(self.cache / self.name, ((f"xllamacpp=={_VERSION}",),))

    def prepare(self, say: Say) -> str:
        env = self.environment
        if not env.is_ready():
            env.make(say)
            env.finish()
        return f"xllamacpp {_VERSION}"

    def launch(self, spec: ServerSpec, port: int) -> Launch:
        if spec.model.gguf is None:
            raise PeerUnavailable("it reads GGUF files only, and the model is a folder")
        argv = (
            *(str(self.environment.python), "-P", str(_SCRIPT)),
            *("--model", str(spec.model.gguf), "--port", str(port)),
            *("--context", str(spec.pool_tokens), "--parallel", str(spec.max_running)),
            *("--threads", str(spec.threads)),
        )
        return Launch(argv=argv)
