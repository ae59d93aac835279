"""Quantised weights through the real loading path: what is kept, what is refused, what comes out.

The oracle of q4 is the fp32 PyTorch model on the same file, which dequantises the same blocks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from phloem.config.checkpoint import four_bit_blocks, read_model_config
from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import WeightFormat
from phloem.models import Quantisation
from phloem.models.packing import load_packed
from tests.kernels.native_build import native_library
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.driver import Driver, load
from tests.models.gguf_files import write_gguf

IDS = list(range(5, 75))
ALL = sorted(["llama", "llama-tied", "qwen2", "qwen3"])


@pytest.fixture(autouse=True, scope="module")
def built():
    native_library()


def write(path: Path, family: str = "llama", kind: Kind = Kind.Q4_0, **options) -> Path:
    """A tiny model whose rows are whole blocks."""
    write_gguf(make_model(family, intermediate_size=128), path, kind=kind, **options)
    return path


def logits(path: Path, *, chunk: int = 0, **options) -> torch.Tensor:
    """At every position of IDS; `chunk` tokens at a time, then token by token."""
    driver = Driver(load(path, page_size=4, **options))
    driver.admit(0, IDS)
    ends = [chunk, *range(chunk + 1, len(IDS) + 1)] if chunk else [len(IDS)]
    start = 0
    for end in ends:
        driver.step(driver.chunk(0, IDS, start, end))
        start = end
    return driver.logits_of(0)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_q4_equals_the_same_blocks_dequantised(family, kind, tmp_path):
    """In fp32, within 2e-4 of the greatest logit: prefill and decode, interleaved q and k too."""
    path = write(tmp_path / "m.gguf", family, kind)
    want = logits(path, kernels="torch")
    assert error(logits(path, quantization="q4"), want) < 2e-4
    assert error(logits(path, quantization="q4", chunk=40), want) < 2e-4


def test_q4_keeps_the_blocks_and_only_them(tmp_path):
    """4.5 or 5 bits a weight, 8.5 for a Q8_0 table; nothing is held in floats beside norms."""
    path = write(tmp_path / "m.gguf", kind=Kind.Q4_1, kinds={"token_embd*": Kind.Q8_0})
    config = read_model_config(path)
    packed = load_packed(path, config, dtype=torch.bfloat16, quantisation=Quantisation.Q4)
    layer = packed.layers[1]
    for weight in (layer.qkv, layer.out, layer.gate_up, layer.down, packed.head):
        assert weight.format is WeightFormat.Q4_1
        assert weight.num_bytes == weight.n * weight.k // 32 * 20


def test_other_tensors_among_blocks_are_kept_as_the_document_says(tmp_path):
    """Floats stay in the model's dtype, foreign or mixed blocks become int8; the model works."""
    kinds = {
        "*attn_v*": Kind.Q8_0,  # merged with Q4_0 rows of q and k
        "*ffn_down*": Kind.Q5_0,
        "*attn_output*": Kind.F16,
        "output.weight": Kind.Q8_0,
    }
    path = write(tmp_path / "m.gguf", kind=Kind.Q4_0, kinds=kinds)
    config = read_model_config(path)
    packed = load_packed(path, config, dtype=torch.bfloat16, quantisation=Quantisation.Q4)
    layer = packed.layers[0]
    assert layer.qkv.format is WeightFormat.Q8_0
    assert layer.down.format is WeightFormat.Q8_0
    assert layer.out.format is WeightFormat.BF16
    assert layer.gate_up.format is WeightFormat.Q4_0
    assert packed.head.format is WeightFormat.Q8_0
    got, want = logits(path, quantization="q4"), logits(path, kernels="torch")
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.999


@pytest.mark.parametrize("family", ALL)
def test_int8_works_on_any_checkpoint(family, tmp_path):
    make_checkpoint(family, tmp_path)
    got, want = logits(tmp_path, quantization="int8"), logits(tmp_path, kernels="torch")
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.998


def test_int8_keeps_the_blocks_of_a_q8_0_file(tmp_path):
    path = write(tmp_path / "m.gguf", kind=Kind.Q8_0)
    want = logits(path, kernels="torch")
    assert error(logits(path, quantization="int8"), want) < 2e-4


REFUSED = {
    "q4 of a folder": ({"quantization": "q4"}, "Q4_1 blocks of a GGUF file as they are, and"),
    "torch": ({"quantization": "int8", "kernels": "torch"}, "leave out --kernels torch"),
    "word": ({"quantization": "int3"}, "supported: none, int8, q4"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_is_refused_in_one_line(name, tmp_path):
    options, message = REFUSED[name]
    make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, page_size=4, **options)
    assert "\n" not in str(caught.value)


def test_q4_without_four_bits_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", kind=Kind.Q8_0)
    assert four_bit_blocks(path) is None
    with pytest.raises(ConfigError, match="has none; use --quantization int8"):
        load(path, page_size=4, quantization="q4")


def test_without_the_library_the_flag_is_named(tmp_path, monkeypatch):
    from phloem.kernels import native_abi

    path = write(tmp_path / "m.gguf")
    assert four_bit_blocks(path) == "Q4_0"
    native_abi.library.cache_clear()
    monkeypatch.setenv("PHLOEM_CPU_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(ConfigError, match="--quantization q4: cannot load the native"):
        load(path, page_size=4, quantization="q4")
    native_abi.library.cache_clear()


def test_other_weights_can_be_loaded_while_serving(tmp_path):
    """A reload packs the new file the same way; a file without blocks leaves the old weights."""
    old, new = write(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    write_gguf(make_model("llama", seed=8, intermediate_size=128), new, kind=Kind.Q4_0)
    floats = tmp_path / "c.gguf"
    write_gguf(make_model("llama", seed=9, intermediate_size=128), floats)
    driver = Driver(load(old, page_size=4, quantization="q4"))
    with pytest.raises(ConfigError, match="has none"):
        driver.loaded.reload(floats)
    driver.loaded.reload(new)()
    driver.admit(0, IDS)
    driver.step(driver.chunk(0, IDS, 0, len(IDS)))
    assert torch.equal(driver.logits_of(0), logits(new, quantization="q4"))
