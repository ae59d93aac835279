"""DeepSeek-V2 and V3 attention: transformers is the oracle, on tiny random dense checkpoints."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from phloem.attention import MLAAttention, native_mla
from phloem.attention.mla import Way
from phloem.attention.native_mla import NativeLatentAttention
from phloem.core.errors import ConfigError
from phloem.kernels.native_abi import CpuIsa
from phloem.worker import WorkerOptions, forward, load_worker
from tests.kernels.native_build import native_library
from tests.long import checkered
from tests.models.checkpoints import LATENT, make_latent
from tests.models.driver import Driver, load
from tests.models.test_against_transformers import TOLERANCE, Case, prompt, relative_error

KERNELS = ["torch", "native"]
WAYS = [f"{kernels}-{way}" for kernels in KERNELS for way in ("absorbed", "expanded", "cheaper")]


@pytest.fixture(scope="module", autouse=True)
def built():
    native_library()


@pytest.fixture(scope="module", params=sorted(LATENT))
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return Case(folder, make_latent(request.param, folder))


@pytest.fixture(params=WAYS)
def way(request, monkeypatch) -> str:
    """Chunks are computed this way, whatever it costs, by the kernels whose name it returns."""
    kernels, way = request.param.split("-")
    if way != "cheaper":
        for owner, kind in ((forward, MLAAttention), (native_mla, NativeLatentAttention)):
            monkeypatch.setattr(owner, kind.__name__, partial(kind, way=Way(way)))
    return kernels


@pytest.fixture(params=KERNELS)
def kernels(request) -> str:
    return request.param


@pytest.mark.parametrize(
    ("page_size", "pages_per_chunk", "way"),
    checkered([1, 4, 16], [1, 3, None], WAYS),
    indirect=["way"],
    ids=str,
)
def test_logits_at_every_position_in_any_chunking(case, page_size, pages_per_chunk, way):
    ids = prompt(53)
    driver = Driver(load(case.path, page_size=page_size, kernels=way))
    driver.admit(0, ids)
    chunk = len(ids) if pages_per_chunk is None else pages_per_chunk * page_size
    driver.prefill(0, ids, 0, chunk)
    assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_ragged_batches_of_prefills_and_decodes(case, page_size, kernels):
    """Rows in different states share every step; each equals the oracle alone on its tokens."""
    driver = Driver(load(case.path, page_size=page_size, kernels=kernels))
    prompts = {row: prompt(length, row) for row, length in enumerate((5, 37, 16, 1, 23))}
    done = dict.fromkeys(prompts, 0)
    for row, ids in prompts.items():
        driver.admit(row, ids)
    for step in range(14):
        plans = []
        for row, ids in prompts.items():
            if step >= row and done[row] < len(ids):
                end = min(len(ids), done[row] + 3 + 4 * row)
                plans.append(driver.chunk(row, ids, done[row], end, sample=end == len(ids)))
                done[row] = end
            elif step >= row:
                plans.append(driver.decode(row))
        driver.step(*plans)
    for row, ids in prompts.items():
        computed = ids + driver.sampled[row]
        assert relative_error(driver.logits_of(row), case.logits(computed)[:-1]) < TOLERANCE
        assert case.would_say(ids, driver.sampled[row])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prefix_computed_by_another_row_is_reused(case, page_size, way):
    shared, tail = prompt(32), prompt(9, 1)
    driver = Driver(load(case.path, page_size=page_size, kernels=way))
    driver.admit(0, shared)
    driver.step(driver.chunk(0, shared, 0, len(shared)))
    ids = shared + tail
    driver.admit(1, ids, shared_with=0, shared_tokens=len(shared))
    driver.step(driver.chunk(1, ids, len(shared), len(ids)))
    assert relative_error(driver.logits_of(1), case.logits(ids)[len(shared) :]) < TOLERANCE


def test_the_definition_agrees_as_well(case):
    ids = prompt(21)
    driver = Driver(load(case.path, page_size=4, kernels="reference"))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, 13)
    assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


def test_bf16_stays_within_its_rounding(case, way):
    ids = prompt(40)
    driver = Driver(load(case.path, page_size=16, dtype="bf16", kernels=way))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, 16)
    got, want = driver.logits_of(0), case.logits(ids)
    assert float((got - want).norm() / want.norm()) < 0.03


def test_a_page_holds_one_normed_latent_and_one_rotated_key_a_token(case, kernels):
    """Not K and V of every head: 3 layers x (32 + 16) numbers, whatever the heads are."""
    ids = prompt(8)
    driver = Driver(load(case.path, page_size=4, kernels=kernels))
    assert driver.loaded.spec.token_bytes == 3 * (32 + 16) * 4
    assert driver.loaded.pool.layout.num_head_groups == 1
    driver.admit(0, ids)
    driver.step(driver.chunk(0, ids, 0, len(ids)))
    layer = case.oracle.model.layers[0]
    with torch.inference_mode():
        x = layer.input_layernorm(case.oracle.model.embed_tokens(torch.tensor(ids)))
        down = layer.self_attn.kv_a_proj_with_mqa(x)
        latent = layer.self_attn.kv_a_layernorm(down[:, :32])
    page = driver.page(0, 1, 0).view(3, 4, 48)[0]
    assert relative_error(page[:, :32], latent[4:]) < TOLERANCE
    lengths = page[:, 32:].norm(dim=1) / down[4:, 32:].norm(dim=1)
    assert float((lengths - lengths[0]).abs().max()) < 1e-5, "a rotation, perhaps scaled"
    assert relative_error(page[:, 32:], down[4:, 32:]) > 0.1, "but not of nothing"


def test_the_largest_length_that_yarn_stretches_to(tmp_path, kernels):
    """Far beyond the original 64 positions, where stretched and plain angles part."""
    case = Case(tmp_path, make_latent("v3-yarn", tmp_path))
    ids = prompt(400)
    driver = Driver(load(case.path, page_size=16, kernels=kernels))
    driver.admit(0, ids)
    driver.prefill(0, ids, 0, 160)
    assert relative_error(driver.logits_of(0), case.logits(ids)) < TOLERANCE


def edited(tmp_path, **changes):
    """A checkpoint whose config.json says something else."""
    make_latent("v2-lite", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.update(changes)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "-"}))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 1}, r"layers 1 to 2 of this deepseek_v2 model are mixtures"),
        ({"first_k_dense_replace": "-", "n_routed_experts": "-"}, r"layers 0 to 2 .* many experts"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"kv_lora_rank": "-"}, "config.json has no kv_lora_rank"),
        ({"qk_rope_head_dim": 7}, "must be even"),
        ({"v_head_dim": 0}, "v_head_dim must be at least 1"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load(edited(tmp_path, **changes), page_size=4)


@pytest.mark.parametrize("experts", [None, 0])
def test_without_experts_every_layer_is_dense(tmp_path, experts):
    path = edited(tmp_path, first_k_dense_replace=0, n_routed_experts=experts)
    assert load(path, page_size=4)[0].config.num_layers == 3


def test_a_lost_tensor_is_named(tmp_path):
    make_latent("v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.kv_a_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor model.layers.1.self_attn.kv_a_layernorm"):
        load(tmp_path, page_size=4)


def test_int8_weights_stay_close(case):
    logits = []
    for options in ({"kernels": "torch"}, {"quantization": "int8"}):
        driver, ids = Driver(load(case.path, page_size=4, **options)), prompt(50)
        driver.admit(0, ids)
        driver.prefill(0, ids, 0, 12)
        logits.append(driver.logits_of(0))
    assert torch.nn.functional.cosine_similarity(*logits, dim=-1).min() > 0.98


def test_auto_takes_native_kernels_unless_pytorch_alone_multiplies_bf16(tmp_path, monkeypatch):
    make_latent("v3", tmp_path)
    monkeypatch.setattr("phloem.kernels.best_isa", lambda: CpuIsa.PLAIN)
    for fast, chosen in ((False, "native"), (True, "torch")):
        monkeypatch.setattr("phloem.kernels.cpu_multiplies_bf16", lambda fast=fast: fast)
        loaded = load_worker(tmp_path, WorkerOptions(num_pages=4, inline=True))
        assert loaded.kernels == chosen


def test_rows_that_native_kernels_cannot_hold_are_named(tmp_path):
    make_latent("v2-lite", tmp_path, kv_lora_rank=1024)
    options = WorkerOptions(num_pages=4, inline=True, kernels="native")
    with pytest.raises(ConfigError, match=r"rows of at most 1024 numbers .* not of 1040; use --"):
        load_worker(tmp_path, options)


def test_num_parameters_is_what_loads(case):
    loaded, _ = load(case.path, page_size=4, kernels="torch")
    assert loaded.config.num_parameters * 4 == loaded.weight_bytes
