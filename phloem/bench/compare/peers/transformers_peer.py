"""transformers behind a small server of ours, its dynamic caches kept between turns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phloem.bench.compare.environment import Environment
from phloem.bench.compare.peer import Launch, Say, ServerSpec

__all__ = ["TransformersPeer", "make_folder"]

_PINS = (("torch==2.13.0",), ("transformers==5.19.0", "accelerate==1.15.0", "gguf==0.19.0"))
_INSIDE = Path(__file__).parent.parent / "inside"


@dataclass(frozen=True, slots=True)
class TransformersPeer:
    """The library alone: one forward pass at a time, equal prompts of equal length in one batch."""

    cache: Path
    name: str = "transformers"
    key: str = "transformers"
    dtypes: tuple[str, ...] = ("bf16", "fp32")

    @property
    def environment(self) -> Environment:
        return Environment(self.cache / self.name, _PINS)

    def prepare(self, say: Say) -> str:
        env = self.environment
        if not env.is_ready():
            env.make(say)
            env.finish()
        return f"transformers {env.version('transformers')}, torch {env.version('torch')}"

    def launch(self, spec: ServerSpec, port: int) -> Launch:
        argv = (
            *(str(self.environment.python), "-P", str(_INSIDE / "serve_transformers.py")),
            *("--model", str(spec.model.folder), "--port", str(port), "--dtype", spec.dtype),
            *("--pool-tokens", str(spec.pool_tokens), "--max-batch", str(spec.max_running)),
            *("--threads", str(spec.threads)),
        )
        return Launch(argv=argv, env={"HF_HUB_OFFLINE": "1"})


def make_folder(peer: TransformersPeer, say: Say, gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a folder of bf16 weights, by the library's own reader."""
    peer.prepare(say)
    say(f"dequantising {gguf.name} into {folder}")
    peer.environment.run_script(_INSIDE / "export_checkpoint.py", str(gguf), str(folder))
