"""Checkpoints on disk: whole ones load exactly, broken ones are refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from phloem.config.checkpoint import read_model_config
from phloem.core.errors import ConfigError
from phloem.models import family_of, load_weights
from tests.models.checkpoints import make_checkpoint, make_model
from tests.models.driver import Driver, load
from tests.models.gguf_files import write_gguf

CPU = torch.device("cpu")


def read(path: Path, dtype: torch.dtype = torch.float32, **options):
    return load_weights(path, read_model_config(path), dtype=dtype, device=CPU, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint("llama", path)
    return path


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    """A checkpoint that the test may break."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def same(a, b) -> bool:
    pairs = [(a.embedding, b.embedding), (a.norm, b.norm), (a.head, b.head)]
    for x, y in zip(a.layers, b.layers, strict=True):
        pairs += [(x.qkv.weight, y.qkv.weight), (x.gate_up.weight, y.gate_up.weight)]
        pairs += [(x.out.weight, y.out.weight), (x.down.weight, y.down.weight)]
        pairs += [(x.attn_norm, y.attn_norm), (x.mlp_norm, y.mlp_norm)]
    return all(torch.equal(x, y) for x, y in pairs)


def test_shards_equal_one_file_and_progress_counts_every_byte(folder, tmp_path):
    make_checkpoint("llama", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    seen: list[tuple[int, int]] = []
    sharded = read(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert same(sharded, read(folder))
    size = sum(t.nbytes for p in tmp_path.glob("*.safetensors") for t in load_file(p).values())
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert sharded.num_bytes == size
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_tied_head_is_the_embedding_and_counts_once(tmp_path):
    make_checkpoint("llama-tied", tmp_path)
    weights = read(tmp_path)
    assert weights.head is weights.embedding
    config = read_model_config(tmp_path)
    assert weights.num_bytes == 4 * config.num_parameters


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen2", "qwen3"])
def test_num_parameters_is_what_loads(family, tmp_path):
    make_checkpoint(family, tmp_path)
    weights = read(tmp_path, torch.bfloat16)
    assert weights.num_bytes == 2 * read_model_config(tmp_path).num_parameters


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    driver = Driver(load(path, page_size=4))
    driver.admit(0, ids)
    driver.step(driver.chunk(0, ids, 0, len(ids)))
    return driver.logits_of(0)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16], ids=lambda k: k.name)
def test_gguf_files_of_every_family(family, kind, tmp_path):
    """q and k rows come back in their order; half precision within its rounding."""
    model, ids = make_model(family), list(range(5, 40))
    write_gguf(model, tmp_path / "m.gguf", kind=kind)
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    got = logits(tmp_path / "m.gguf", ids)
    limit = {Kind.F32: 1e-4, Kind.F16: 1e-2, Kind.BF16: 5e-2}[kind]
    assert float((got - want).norm() / want.norm()) < limit


def test_gguf_rope_factors_stretch_as_llama3_does(tmp_path):
    model, ids = make_model("llama-rope3"), list(range(5, 60))
    write_gguf(model, tmp_path / "m.gguf", rope_factors=True)
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    got = logits(tmp_path / "m.gguf", ids)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_gguf_blocks_are_dequantised(kind, tmp_path, monkeypatch):
    """Every row, over several passes of the reader, as the `gguf` package alone would."""
    monkeypatch.setattr("phloem.models.gguf_source._BLOCK_BYTES", 200)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(320, 64)).astype(np.float32)
    model = make_model("llama")
    model.model.embed_tokens.weight.data = torch.from_numpy(data)
    for name, weight in model.named_parameters():
        if name.endswith("down_proj.weight"):  # 112 is no multiple of a block of 32
            weight.data = torch.zeros(64, 128)
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weight.data = torch.zeros(128, 64)
    model.config.intermediate_size = 128
    write_gguf(model, tmp_path / "m.gguf", kind=kind)
    want = gguf.quants.dequantize(gguf.quants.quantize(data, kind), kind)
    assert torch.equal(read(tmp_path / "m.gguf").embedding, torch.from_numpy(want))


def edit_json(path: Path, **changes) -> None:
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def drop_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
BREAKS = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "not a complete safetensors"),
    "half the weights": (lambda f: cut(f / "model.safetensors", 0.5), "not a complete safetensors"),
    "missing tensor": (lambda f: drop_tensor(f, K_PROJ), f"no tensor {K_PROJ}"),
    "wrong size": (
        lambda f: edit_json(f / "config.json", intermediate_size=96),
        r"mlp.gate_proj.weight has shape \(112, 64\), the config wants \(96, 64\)",
    ),
    "more layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=4), "no tensor model"),
}


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_broken_folder_is_refused_in_one_line(name, copy):
    break_it, message = BREAKS[name]
    break_it(copy)
    with pytest.raises(ConfigError, match=message) as caught:
        read(copy)
    assert "\n" not in str(caught.value)


def test_broken_shards_are_refused(tmp_path):
    make_checkpoint("llama", tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    good = index.read_text()
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    index.write_text("{}")
    with pytest.raises(ConfigError, match="not a readable index"):
        read(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(ConfigError, match="must map tensor names to file names"):
        read(tmp_path)
    index.write_text(good.replace('"model.norm.weight"', '"model.norm.wait"'))
    with pytest.raises(ConfigError, match=r"has no tensor model\.norm\.wait"):
        read(tmp_path)
    index.write_text(good)
    shard.unlink()
    with pytest.raises(ConfigError, match="is missing, though"):
        read(tmp_path)


@pytest.fixture
def gguf_path(tmp_path) -> Path:
    write_gguf(make_model("llama"), tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.99])
def test_a_gguf_file_cut_short_is_refused(keep, gguf_path):
    cut(gguf_path, keep)
    with pytest.raises(ConfigError, match=r"not a readable GGUF file|is cut short") as caught:
        read(gguf_path)
    assert "\n" not in str(caught.value)


def test_other_files_are_no_gguf(gguf_path, tmp_path):
    gguf_path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="wrong magic number"):
        read(gguf_path)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"neither a Hugging Face folder nor a \.gguf file"):
        read(other)
    with pytest.raises(ConfigError, match="no model at"):
        read(tmp_path / "absent")


@pytest.mark.parametrize("name", ["family", "decoder", "nothing", "os.path", ""])
def test_a_module_that_is_no_family_is_refused(name):
    with pytest.raises(ConfigError, match="no model family"):
        family_of(name)
