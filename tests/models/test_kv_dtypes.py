"""What page dtypes cost: errors of attention and logits, and the perplexity of SmolLM2 on a novel.

Bounds are a little above what was measured; a scale that is a power of two off, of the wrong token
or of the wrong head is far outside.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from phloem.attention import GatherAttention, RaggedBatch, RowSpan
from phloem.core.errors import ConfigError
from phloem.kernels import TorchOps, codec
from phloem.kv.layout import PageLayout
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.pools import DevicePool
from phloem.worker import Hooks, WorkerOptions, load_worker
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_checkpoint, make_latent, make_windowed
from tests.models.driver import Driver, load
from tests.models.test_against_transformers import prompt
from tests.models.test_perplexity import BOOKS, ROW_TOKENS, Surprise, tokens_of
from tests.models.test_smollm2 import find_gguf

DTYPES = [d.value for d in KVDtype]
PACKED = [d.value for d in KVDtype if d.is_packed]
# Of an output of attention over 500 random tokens: mean over tokens and heads of the error's norm
# over that of the output. Measured: 0, 0.0024, 0.0083, 0.035, 0.12.
ATTENTION = {"fp32": 1e-6, "bf16": 0.003, "int8": 0.01, "fp8": 0.04, "fp4": 0.14}
# Of logits of tiny random models, over the norm of those with fp32 pages. Norms of heads and norms
# behind attention make Gemma 3's twice as sensitive, measured: 0.0068, 0.03, 0.12, 0.36.
LOGITS = {"fp32": 1e-6, "bf16": 0.004, "int8": 0.018, "fp8": 0.07, "fp4": 0.25}
# Perplexity over that with bf16 pages, less one: at most.
PERPLEXITY = {"fp32": 0.001, "int8": 0.005, "fp8": 0.015, "fp4": 0.08}


def attention_errors(dtype: str) -> tuple[float, float]:
    """Mean and largest relative error of outputs; 9 heads on 3 of 64, scores of unit size."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(500, heads, 64) for heads in (9, 3, 3))
    batch = RaggedBatch((RowSpan(0, 0, 500, np.arange(32)),), 16)

    def run(kind: KVDtype) -> torch.Tensor:
        sizes = {"num_layers": 1, "num_kv_heads": 3, "head_dim": 64, "page_size": 16}
        spec = KVSpec(kind=AttentionKind.GQA, dtype=kind, **sizes)
        pool = DevicePool(PageLayout(spec, 32, 3), device=torch.device("cpu"), dtype=q.dtype)
        attention = GatherAttention(pool.buffer, TorchOps())
        return attention.run(0, q, k, v, attention.plan(batch)).view(500, 9, 64)

    want = run(KVDtype.FP32)
    errors = (run(KVDtype(dtype)) - want).norm(dim=-1) / want.norm(dim=-1)
    return float(errors.mean()), float(errors.max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_of_attention_over_random_tokens(dtype):
    mean, largest = attention_errors(dtype)
    print(f"{dtype}: mean {mean:.2g}, max {largest:.2g}")
    assert ATTENTION[dtype] / 3 * (dtype != "fp32") <= mean < ATTENTION[dtype]
    assert largest < 4 * ATTENTION[dtype]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def make(kind: str) -> Path:
        path = tmp_path_factory.mktemp("models") / kind
        if kind == "gemma3":
            make_windowed(kind, path, window=8, head_dim=32)
        else:
            {"llama": make_checkpoint, "v3": make_latent}[kind](kind, path)
        return path

    return make


def logits_with(path: Path, **options: object) -> torch.Tensor:
    ids = prompt(60)
    driver = Driver(load(path, page_size=4, **options))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, 23)
    for _ in range(4):
        driver.step(driver.decode(0))
    return driver.logits_of(0)[:60]


@pytest.mark.parametrize("kind", ["llama", "v3", "gemma3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_of_logits_of_tiny_models(models, kind, dtype):
    want = logits_with(models(kind), kernels="torch")
    got = logits_with(models(kind), kernels="torch", kv_dtype=dtype)
    error = float((got - want).norm() / want.norm())
    print(f"{kind} {dtype}: {error:.2g}")
    assert error < LOGITS[dtype] * (2 if kind == "gemma3" else 1)
    assert error > LOGITS[dtype] / 4 or dtype == "fp32", "pages are not in that dtype"


@pytest.mark.parametrize("kind", ["llama", "v3", "gemma3"])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_fast_and_reference_kernels_agree(models, kind, kernels):
    """All pack alike. A number at the border of two codes may fall to either side: int8 is fine
    enough that it does not matter."""
    native_library()
    both = [logits_with(models(kind), kernels=k, kv_dtype="int8") for k in (kernels, "reference")]
    assert float((both[0] - both[1]).norm() / both[1].norm()) < 3e-3


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8", "fp4"])
@pytest.mark.parametrize("kind", ["llama", "v3"])
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_bf16_model_reads_packed_pages(models, kind, dtype, kernels):
    native_library()
    want = logits_with(models(kind), kernels="torch")
    got = logits_with(models(kind), kernels=kernels, dtype="bf16", kv_dtype=dtype)
    assert float((got - want).norm() / want.norm()) < LOGITS[dtype] + 0.03


def twice_the_scale(patch: pytest.MonkeyPatch) -> None:
    decode = codec.PackedCodec.decode
    patch.setattr(codec.PackedCodec, "decode", lambda self, stored: 2 * decode(self, stored))


def scale_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    encode = codec.PackedCodec.encode

    def shifted(self: codec.PackedCodec, rows: torch.Tensor) -> torch.Tensor:
        stored = encode(self, rows)
        stored[..., -2:] = stored[..., -2:].roll(1, dims=0)
        return stored

    patch.setattr(codec.PackedCodec, "encode", shifted)


@pytest.mark.parametrize("mutate", [twice_the_scale, scale_of_the_token_before])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_wrong_scale_is_outside_of_the_bounds(models, monkeypatch, dtype, mutate):
    want = logits_with(models("llama"), kernels="torch")
    mutate(monkeypatch)
    got = logits_with(models("llama"), kernels="torch", kv_dtype=dtype)
    assert float((got - want).norm() / want.norm()) > LOGITS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_takes_native_kernels_for_pages_of_any_dtype(models, monkeypatch, dtype):
    native_library()
    monkeypatch.setattr("phloem.kernels.cpu_multiplies_bf16", lambda: False)
    chosen = WorkerOptions(num_pages=4, inline=True, kv_dtype=dtype)
    assert load_worker(models("llama"), chosen).kernels == "native"


def test_auto_dtype_is_the_models(models):
    plain = load_worker(models("llama"), WorkerOptions(num_pages=4, inline=True, kernels="torch"))
    assert plain.spec.dtype is KVDtype.BF16
    with pytest.raises(ConfigError, match="unknown dtype 'int4'; supported: fp32, bf16, int8"):
        load_worker(models("llama"), WorkerOptions(num_pages=4, kv_dtype="int4"))
    with pytest.raises(ConfigError, match=r"dtype 'int8'; supported: fp32, bf16$"):
        load_worker(models("llama"), WorkerOptions(num_pages=4, dtype="int8"))


def perplexity(ids: list[int], kv_dtype: str) -> float:
    """Of stretches of ROW_TOKENS, each from its own beginning; weights and sums in fp32."""
    surprise = Surprise()
    options = WorkerOptions(
        dtype="fp32",
        kv_dtype=kv_dtype,
        num_pages=ROW_TOKENS // 16 + 1,
        inline=True,
        threads=1,
        kernels="torch",
        hooks=Hooks(capture_logits=surprise),
    )
    driver = Driver((load_worker(find_gguf(), options), surprise))
    for low in range(0, len(ids), ROW_TOKENS):
        surprise.ids = ids[low : low + ROW_TOKENS]
        if low == 0:
            driver.admit(0, surprise.ids, room=0)
        driver.step(driver.chunk(0, surprise.ids, 0, len(surprise.ids)))
    return surprise.perplexity


def check_perplexity(ids: list[int], dtypes: list[str]) -> None:
    exact = perplexity(ids, "bf16")
    found = {dtype: perplexity(ids, dtype) / exact - 1 for dtype in dtypes}
    print(f"{len(ids)} tokens: bf16 {exact:.3f}, others relative to it {found}")
    assert all(abs(found[dtype]) < PERPLEXITY[dtype] for dtype in dtypes)


@pytest.mark.timeout(600)
def test_perplexity_of_a_page():
    check_perplexity(tokens_of(BOOKS[0], ROW_TOKENS), ["int8"])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("book", BOOKS)
def test_perplexity_of_some_pages(book):
    check_perplexity(tokens_of(book, 4 * ROW_TOKENS), ["fp32", *PACKED])
