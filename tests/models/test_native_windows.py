"""Models with windows on the native kernels: what `test_windows` does not ask of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phloem import kernels
from phloem.config.checkpoint import read_model_config
from phloem.kernels.native_abi import CpuIsa
from phloem.models.native_fit import native_fits
from phloem.worker import forward
from tests.kernels.native_build import native_library
from tests.models.checkpoints import WINDOWED, make_windowed
from tests.models.driver import Driver, load
from tests.models.test_against_transformers import prompt

WINDOW = 8


@pytest.fixture(scope="module", params=sorted(WINDOWED))
def path(request, tmp_path_factory):
    native_library()
    folder = tmp_path_factory.mktemp(request.param)
    make_windowed(request.param, folder, window=WINDOW)
    return folder


def test_auto_takes_native_kernels_unless_pytorch_alone_multiplies_bf16(path, monkeypatch):
    """Every family of windows fits; an MLP whose width is no multiple of a panel does not."""
    config, cpu = read_model_config(path), torch.device("cpu")
    for fast, isa, chosen in (
        (False, CpuIsa.PLAIN, "native"),
        (True, CpuIsa.AMX, "native"),
        (True, CpuIsa.PLAIN, "torch"),
    ):
        monkeypatch.setattr(kernels, "cpu_multiplies_bf16", lambda fast=fast: fast)
        monkeypatch.setattr(kernels, "best_isa", lambda isa=isa: isa)
        assert forward.choose_kernels("auto", cpu, config) == chosen
    odd = replace(config, intermediate_size=100)
    assert "this model's is 100" in (native_fits(odd) or "")


def test_int8_weights_stay_close(path):
    logits = []
    for options in ({"kernels": "torch"}, {"quantization": "int8"}):
        driver, ids = Driver(load(path, page_size=4, **options)), prompt(50)
        driver.admit(0, ids)
        driver.prefill(0, ids, 0, 12, window=WINDOW)
        logits.append(driver.logits_of(0))
    assert torch.nn.functional.cosine_similarity(*logits, dim=-1).min() > 0.98


def test_a_row_does_not_depend_on_its_batch(path):
    """Bit for bit: chunks and decodes beside another row that is elsewhere, and alone."""
    results = []
    for beside in (False, True):
        driver, ids = Driver(load(path, page_size=4, kernels="native", dtype="bf16")), prompt(30)
        other = prompt(70, 1)
        driver.admit(0, ids)
        driver.admit(1, other)
        driver.prefill(1, other, 0, 70, window=WINDOW)
        for low in (0, 15):
            rows = [driver.chunk(0, ids, low, low + 15, sample=low == 15)]
            driver.step(*([driver.decode(1)] if beside else []), *rows)
        for _ in range(4):
            driver.step(driver.decode(0), *([driver.decode(1)] if beside else []))
            driver.slide(0, WINDOW)
        results.append(driver.logits_of(0))
    assert torch.equal(*results)
