"""Engines of one or several ranks that a bench drives itself, prompt by prompt."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from phloem.bench.core_hooks import KeptChunks
from phloem.config import (
    CacheOptions,
    Config,
    ModelOptions,
    ParallelOptions,
    RuntimeOptions,
    SchedulerOptions,
    TierOptions,
)
from phloem.core.namespace import make_namespace
from phloem.core.request import FinishReason, GenerateRequest, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.engine.build import build_core
from phloem.engine.core import EngineCore

__all__ = ["BenchEngine", "EngineShape", "open_engines", "random_prompt", "write_random_model"]

MAX_MODEL_LEN = 20480
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 576, 9, 3, 64, 1536, 49152


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What differs between the engines of a bench; each rank has one thread."""

    cp: int = 1
    placement: str = "striped"
    threads: int = 1
    num_pages: int = 1400  # of each rank
    remote_kv: str = "direct"


class BenchEngine:
    """Drives a core on the calling thread. Owns it."""

    def __init__(self, model: Path | str, shape: EngineShape) -> None:
        config = Config(
            model=ModelOptions(model=str(model), dtype="bf16", max_model_len=MAX_MODEL_LEN),
            cache=CacheOptions(num_pages=shape.num_pages),
            parallel=ParallelOptions(
                cp=shape.cp,
                placement=shape.placement,  # type: ignore[arg-type]
                remote_kv=shape.remote_kv,  # type: ignore[arg-type]
            ),
            tiers=TierOptions(host_memory="0"),
            # A prompt is one step, whose ranks meet in each layer once.
            scheduler=SchedulerOptions(
                max_prefill_tokens=MAX_MODEL_LEN, prefill_slice=MAX_MODEL_LEN
            ),
            runtime=RuntimeOptions(threads=shape.threads),
        )
        self._hooks = KeptChunks()
        self._names = itertools.count()
        self._core: EngineCore = build_core(config, self._hooks, ())

    def answer(self, prompt: list[int], num_tokens: int = 1) -> float:
        """Seconds from a prompt to the end of its answer."""
        request = GenerateRequest(
            request_id=str(next(self._names)),
            tokens=tokens_to_bytes(prompt),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
            namespace=make_namespace(model="bench"),
        )
        self._hooks.chunks.clear()
        started = time.perf_counter()
        self._core.add(request)
        while self._core.step():
            pass
        took = time.perf_counter() - started
        last = self._hooks.chunks[-1]
        if last.finish is not FinishReason.LENGTH:
            raise RuntimeError(f"the bench's request ended with {last.finish}: {last.error}")
        return took

    def forget(self) -> None:
        """No prefix is cached any more."""
        self._core.flush()

    @property
    def cached_tokens(self) -> int:
        """Of all prompts so far."""
        return self._core.stats().cached_tokens_total.total

    def close(self) -> None:
        self._core.close()


@contextmanager
def open_engines(model: Path | str, *shapes: EngineShape) -> Iterator[list[BenchEngine]]:
    """An engine of each shape; they are idle, and asleep, while another one runs."""
    with ExitStack() as stack:
        engines = []
        for shape in shapes:
            engines.append(BenchEngine(model, shape))
            stack.callback(engines[-1].close)
        yield engines


def write_random_model(folder: Path, *, num_layers: int, seed: int = 0) -> Path:
    """A model of SmolLM2-135M's shape with random weights, of so many of its 30 layers."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.02).bfloat16()

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for number in range(num_layers):
        at = f"model.layers.{number}."
        for name, shape in {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            tensors[f"{at}{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Ids that no cache has seen."""
    return [rng.randrange(VOCAB) for _ in range(length)]
