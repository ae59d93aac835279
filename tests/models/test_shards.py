"""A model in parts: what each part reads, and that the parts are the whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind

from phloem.config.checkpoint import read_model_config
from phloem.core.errors import ConfigError
from phloem.groups import local_groups
from phloem.kernels.native_pack import pack
from phloem.models import Quantisation, load_weights
from phloem.models.gguf_source import GGUFSource
from phloem.models.packing import load_packed
from phloem.models.row import Row
from phloem.models.safetensors_source import SafetensorsSource
from phloem.models.shard import WHOLE, Shard, check_tp
from phloem.models.source import Part
from tests.kernels.native_build import native_library
from tests.models.checkpoints import (
    make_checkpoint,
    make_latent,
    make_model,
    make_windowed,
)
from tests.models.gguf_files import write_gguf

CPU = torch.device("cpu")
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "gpt_oss", "gemma3", "v2-lite", "v3-halves"]


def make(family: str, folder: Path) -> Path:
    if family.startswith("v"):
        make_latent(family, folder)
    elif family in ("gpt_oss", "gemma3"):
        make_windowed(family, folder, window=8)
    else:
        make_checkpoint(family, folder)
    return folder


def load(path: Path, shard: Shard = WHOLE):
    config = read_model_config(path)
    return load_weights(path, config, dtype=torch.float32, device=CPU, shard=shard)


def halves(weights, name: str) -> torch.Tensor | None:
    linear = getattr(weights, name)
    return None if linear is None else linear.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_side_by_side_are_the_whole(family, tmp_path):
    """Rows of what makes heads and of the MLP, columns of what they feed, and all of the rest."""
    path = make(family, tmp_path)
    config, whole = read_model_config(path), load(path)
    parts = [load(path, Shard(i, 2)) for i in range(2)]
    assert {part.num_bytes for part in parts} == {parts[0].num_bytes}
    assert parts[0].num_bytes < whole.num_bytes
    assert torch.equal(torch.cat([part.head for part in parts]), whole.head)
    assert all(torch.equal(part.embedding, whole.embedding) for part in parts)
    for number, layer in enumerate(whole.layers):
        one, two = (part.layers[number] for part in parts)
        for name in ("out", "down"):
            columns = [getattr(each, name).weight for each in (one, two)]
            assert torch.equal(torch.cat(columns, dim=1), getattr(layer, name).weight)
        rows = [each.gate_up.weight.chunk(2) for each in (one, two)]
        for which, matrix in enumerate(layer.gate_up.weight.chunk(2)):
            assert torch.equal(torch.cat([each[which] for each in rows]), matrix)
        if config.mla is not None:
            name = "kv_up" if config.mla.q_rank is None else "q_up"
            pair = [halves(each, name) for each in (one, two)]
            assert torch.equal(torch.cat(pair), halves(layer, name))
            continue
        sizes = [config.q_size, config.kv_size, config.kv_size]
        for tensors in (
            [each.qkv.weight for each in (one, two, layer)],
            [each.qkv.bias for each in (one, two, layer)],
        ):
            if tensors[0] is not None:
                own = [tensor.split([size // 2 for size in sizes]) for tensor in tensors[:2]]
                for which, want in enumerate(tensors[2].split(sizes)):
                    assert torch.equal(torch.cat([each[which] for each in own]), want)
        if layer.sinks is not None:
            assert torch.equal(torch.cat([one.sinks, two.sinks]), layer.sinks)


def test_the_sum_of_all_summands_is_the_whole_product(tmp_path):
    """To the same bits on every rank of the row; red if a part is left out or added twice."""
    path = make("llama", tmp_path)
    layer = load(path).layers[0]
    parts = [load(path, Shard(i, 2)).layers[0] for i in range(2)]
    x = torch.randn(5, layer.out.weight.shape[1], generator=torch.Generator().manual_seed(3))
    groups = local_groups(2, axis="tp")

    def compute(rank: int) -> torch.Tensor:
        own = x.chunk(2, dim=1)[rank]
        return Row(groups[rank]).add_up(own @ parts[rank].out.weight.T)

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(compute, range(2))
    assert torch.equal(one, two)
    want = x @ layer.out.weight.T
    assert (one - want).abs().max() < 1e-5 * want.abs().max()


def test_columns_of_logits_are_joined_on_the_first_rank():
    groups = local_groups(3, axis="tp")
    parts = [torch.full((2, 4), float(rank)) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        joined = list(threads.map(lambda r: Row(groups[r]).join(parts[r]), range(3)))
    assert torch.equal(joined[0], torch.cat(parts, dim=1))
    assert [len(each) for each in joined] == [2, 0, 0]


def test_a_part_is_read_alone(tmp_path, monkeypatch):
    """Red if a rank reads the whole tensor for its part of it."""
    source = SafetensorsSource(make("llama", tmp_path))
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = torch.empty(source.shape(name))
    source.copy_to(name, whole)
    monkeypatch.setattr(source, "_home", {name: Sliced(source._home[name])})
    out = torch.empty(16, 8)
    source.copy_to(name, out, Part(rows=(4, 20), columns=(8, 16)))
    assert torch.equal(out, whole[4:20, 8:16])
    with pytest.raises(AssertionError):
        source.copy_to(name, whole)


class Sliced:
    """An open file of which nobody may read a whole tensor."""

    def __init__(self, file) -> None:
        self.get_slice = file.get_slice

    def get_tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(f"all of {name} was read")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0], ids=lambda k: k.name)
def test_parts_of_gguf_tensors(kind, tmp_path):
    """Rows anywhere, columns at the borders of blocks, elements of vectors."""
    path = tmp_path / "model.gguf"
    write_gguf(make_model("llama", intermediate_size=128), path, kind=kind)
    source = GGUFSource(path)
    name = "blk.1.ffn_down.weight"
    whole = torch.empty(64, 128)
    source.copy_to(name, whole)
    out = torch.empty(10, 64)
    source.copy_to(name, out, Part(rows=(3, 13), columns=(64, 128)))
    assert torch.equal(out, whole[3:13, 64:])
    if source.block_format(name) is not None:
        blocks = source.blocks(name, Part(rows=(3, 13), columns=(64, 128)))
        assert torch.equal(blocks.dequantise(), out)
    if kind is not Kind.F16:
        with pytest.raises(ConfigError, match="blocks of 32 weights"):
            source.copy_to(name, torch.empty(64, 16), Part(columns=(16, 32)))
    norm, part = torch.empty(64), torch.empty(7)
    source.copy_to("blk.0.attn_norm.weight", norm)
    source.copy_to("blk.0.attn_norm.weight", part, Part(rows=(9, 16)))
    assert torch.equal(part, norm[9:16])


@pytest.mark.parametrize("quantisation", [Quantisation.NONE, Quantisation.INT8])
def test_packed_shards_multiply_as_the_whole(quantisation, tmp_path):
    """Quantised as well: a scale is of the same 32 weights whoever has them."""
    native_library()
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    write_gguf(make_model("llama", **sizes, head_dim=32), path)
    config = read_model_config(path)
    options = {"dtype": torch.float32, "quantisation": quantisation}
    whole = load_packed(path, config, **options)
    parts = [load_packed(path, config, shard=Shard(i, 2), **options) for i in range(2)]
    assert {part.num_bytes for part in parts} == {parts[0].num_bytes}
    for number, layer in enumerate(whole.layers):
        for name in ("out", "down"):
            pair = [getattr(part.layers[number], name) for part in parts]
            want = getattr(layer, name)
            assert [each.k for each in pair] == [want.k // 2] * 2
            halved = [each.data.view(want.n // 16, -1) for each in pair]
            assert torch.equal(torch.cat(halved, dim=1), want.data.view(want.n // 16, -1))
        assert sum(part.layers[number].qkv.n for part in parts) == layer.qkv.n


def test_a_tied_head_in_parts_is_a_view_of_the_embedding(tmp_path):
    native_library()
    make_model("llama-tied", intermediate_size=128).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    part = load_packed(tmp_path, config, dtype=torch.float32, shard=Shard(1, 2))
    want = load(tmp_path).embedding[160:]
    assert torch.equal(part.head.data, pack(want).data)
    low, high = part.embedding.data.data_ptr(), part.embedding.num_bytes
    assert low < part.head.data.data_ptr() < low + high
    alone = sum(layer.num_bytes for layer in part.layers)
    assert part.num_bytes == alone + part.embedding.num_bytes + part.norm.nbytes


def test_a_shard_that_would_cut_a_quantised_block_is_refused(tmp_path):
    native_library()
    make_model("llama", intermediate_size=160).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="cut such a block"):
        load_packed(
            tmp_path,
            config,
            dtype=torch.float32,
            quantisation=Quantisation.INT8,
            shard=Shard(0, 2),
        )


def test_what_tp_must_divide(tmp_path):
    config = read_model_config(make("llama", tmp_path))  # 4 heads, 2 KV heads, MLP of 112
    check_tp(config, 1)
    check_tp(config, 2)
    with pytest.raises(ConfigError, match="--tp 4 does not divide the model's 2 KV heads; use --t"):
        check_tp(config, 4)
    with pytest.raises(ConfigError, match="113 intermediate size; use --cp"):
        check_tp(replace(config, intermediate_size=113), 2)
    wide = replace(config, num_heads=12, num_kv_heads=12)
    with pytest.raises(ConfigError, match=r"--tp 4 .* 6 head groups; use --tp 2"):
        check_tp(wide, 4)


def test_parts_have_shapes():
    assert Part().shape((3, 4)) == (3, 4)
    assert Part(rows=(1, 3)).shape((5,)) == (2,)
    assert Part(rows=(1, 3), columns=(0, 2)).shape((5, 9)) == (2, 2)
    spans = [Shard(i, 4).span(12) for i in range(4)]
    assert np.array_equal(np.concatenate([np.arange(*span) for span in spans]), np.arange(12))
