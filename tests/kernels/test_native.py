"""The native kernels against the reference: matrix products, norms, gathers, choosing, contexts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from phloem.core.errors import ConfigError
from phloem.kernels import ReferenceOps, native_abi
from phloem.kernels.native import CpuIsa, NativeKernels
from phloem.kernels.native_abi import Gate, WeightFormat
from phloem.kernels.native_pack import pack, pack_blocks, pack_gate_up
from phloem.kernels.quantised import BlockMatrix
from tests.kernels.native_build import native_library

SLOW = ReferenceOps()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    scale = max(float(want.float().abs().max()), 1.0)
    return bool((got.float() - want.float()).abs().max() / scale < TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 8, 64, 300])
@pytest.mark.parametrize("shape", [(48, 64), (50, 37), (1, 1), (33, 160)])
def test_linear(kernels, dtype, rows, shape):
    """Also for odd sizes and strided rows; the residual may be the output itself."""
    n, k = shape
    x, w = torch.randn(rows, k + 3).to(dtype)[:, :k], torch.randn(n, k).to(dtype)
    bias, residual = torch.randn(n).to(dtype), torch.randn(rows, n).to(dtype)
    packed = pack(w, bias)
    assert close(kernels.linear(x, packed), SLOW.linear(x, w, bias), dtype)
    want = (x.float() @ w.float().T + bias.float() + residual.float()).to(dtype)
    got = kernels.linear(x, packed, residual=residual, out=residual)
    assert got is residual
    assert close(got, want, dtype)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_linear_widens_bf16_weights_exactly(kernels, rows):
    """fp32 activations on bf16 weights lose nothing to bf16; where bf16 itself is multiplied, one
    rounding."""
    x, w = torch.randn(rows, 96), torch.randn(40, 96).bfloat16()
    if kernels.isa in (CpuIsa.AVX512BF16, CpuIsa.AMX):
        rounded = x.bfloat16()
        assert torch.equal(kernels.linear(x, pack(w)), kernels.linear(rounded.float(), pack(w)))
        x = rounded.float()
    assert close(kernels.linear(x, pack(w)), x @ w.float().T, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 270])
def test_gate_up_with_silu(kernels, dtype, rows):
    gate, up = torch.randn(2, 48, 64).to(dtype)
    x = torch.randn(rows, 64).to(dtype) / 8
    both = (x.float() @ torch.cat((gate, up)).float().T).float()
    want = SLOW.silu_mul(both).to(dtype)
    assert close(kernels.linear(x, pack_gate_up(gate, up)), want, dtype)


def packed_as(kind: WeightFormat, weight: torch.Tensor):
    if kind in (WeightFormat.Q4_0, WeightFormat.Q4_1):
        return pack_blocks(blocks_of(kind, weight))
    return pack(weight, format=kind)


@pytest.mark.parametrize("weights", list(WeightFormat), ids=lambda f: f.name)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels, weights):
    """Bit for bit, whatever the batch."""
    x, packed = torch.randn(301, 96), packed_as(weights, torch.randn(80, 96))
    whole = kernels.linear(x, packed)
    for low, high in ((0, 1), (1, 3), (3, 10), (10, 74), (20, 301)):
        assert torch.equal(kernels.linear(x[low:high], packed), whole[low:high])


def blocks_of(kind: WeightFormat, weight: torch.Tensor) -> BlockMatrix:
    """As GGUF's own tools quantise."""
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind.name])
    return BlockMatrix(torch.from_numpy(raw.copy()), kind)


def exact_enough(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Within accumulation error: relative to the sum of the products' magnitudes."""
    x, weight = x.double(), weight.double()
    error = (got.double() - x @ weight.T).abs()
    return bool((error <= 3e-5 * (x.abs() @ weight.abs().T)).all())


BLOCKS = [WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda f: f.name)
def test_dequantised_blocks_are_what_gguf_says(kind):
    """The oracle of all below, against GGUF's own package, bit for bit."""
    matrix = blocks_of(kind, torch.randn(7, 96) * torch.rand(7, 1))
    want = gguf.quants.dequantize(matrix.raw.numpy(), gguf.GGMLQuantizationType[kind.name])
    assert torch.equal(matrix.dequantise(), torch.from_numpy(want))


@pytest.mark.parametrize("shape", [(70, 160), (5, 32), (16, 64)])
def test_int8_rounds_as_gguf_does(shape):
    """Packed from floats and packed from GGUF's Q8_0 blocks of them: the same bytes."""
    weight = torch.randn(shape) * torch.logspace(-6, 3, shape[0])[:, None]
    weight[0] = 0.0
    ours = pack(weight, format=WeightFormat.Q8_0)
    assert torch.equal(ours.data, pack_blocks(blocks_of(WeightFormat.Q8_0, weight)).data)


@pytest.mark.parametrize("width", [1, 31, 33, 112])
def test_int8_rows_may_end_within_a_block(kernels, width):
    weight, x = torch.randn(20, width), torch.randn(5, width)
    whole = torch.nn.functional.pad(weight, (0, -width % 32))
    exact = blocks_of(WeightFormat.Q8_0, whole).dequantise()[:, :width]
    assert exact_enough(kernels.linear(x, pack(weight, format=WeightFormat.Q8_0)), x, exact)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 2, 5, 40, 300])
def test_products_of_blocks_equal_the_same_blocks_dequantised(kernels, kind, rows):
    matrix = blocks_of(kind, torch.randn(70, 160))
    x = torch.randn(rows, 160)
    assert exact_enough(kernels.linear(x, pack_blocks(matrix)), x, matrix.dequantise())


def test_gguf_blocks_show_nan_activations(kernels):
    matrix = BlockMatrix(torch.zeros((16, 34), dtype=torch.uint8), WeightFormat.Q8_0)
    x = torch.ones(2, 32)
    x[1, 7] = torch.nan
    out = kernels.linear(x, pack_blocks(matrix))
    assert (out[0] == 0).all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 64), (4, 3, 7), (900, 40)])
def test_rms_norm(kernels, dtype, shape):
    x, residual = torch.randn(shape).to(dtype) * 3, torch.randn(shape).to(dtype)
    w = torch.rand(shape[-1]).to(dtype)
    assert close(kernels.rms_norm(x, w, 1e-5), SLOW.rms_norm(x, w, 1e-5), dtype)
    total = residual + x
    got = kernels.rms_norm(x, w, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    assert close(got, SLOW.rms_norm(total, w, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 33])
def test_silu_mul(kernels, dtype, width):
    gate_up = torch.randn(7, 2 * width).to(dtype) * 4
    assert close(kernels.silu_mul(gate_up), SLOW.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 270])
def test_gate_up_with_gelu(kernels, dtype, rows):
    """Gates from -40 to 40 among them: no NaN out of exponents that overflow."""
    gate, up = torch.randn(2, 48, 64).to(dtype)
    x = torch.randn(rows, 64).to(dtype)
    x[0] *= 4
    both = (x.float() @ torch.cat((gate, up)).float().T).float()
    want = SLOW.gelu_tanh_mul(both).to(dtype)
    got = kernels.linear(x, pack_gate_up(gate, up), gate=Gate.GELU_TANH)
    assert got.isfinite().all()
    assert close(got / 64, want / 64, dtype)


def test_silu_of_extreme_values(kernels):
    """No NaN out of large magnitudes; NaN stays NaN."""
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan]])
    out = kernels.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    want = torch.nn.functional.silu(gate)
    assert torch.allclose(out, want, atol=1e-30, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(kernels, dtype):
    """Rows come out of the packed table as they went in, so that a tied head needs no copy."""
    table, ids = torch.randn(50, 23).to(dtype), torch.tensor([3, 49, 0, 3])
    packed = pack(table)
    for out in DTYPES:
        assert torch.equal(kernels.embedding(ids, packed, out), table[ids].to(out))
    with pytest.raises(ValueError, match="id 50 outside"):
        kernels.embedding(torch.tensor([50]), packed, dtype)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda f: f.name)
def test_embedding_of_blocks(kernels, kind):
    matrix, ids = blocks_of(kind, torch.randn(50, 96)), torch.tensor([3, 49, 0, 3])
    got = kernels.embedding(ids, pack_blocks(matrix), torch.float32)
    assert torch.allclose(got, matrix.dequantise()[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 5, 64, 1003, 3000])
def test_argmax_takes_the_first_of_equals(kernels, dtype, n):
    logits = torch.randint(-5, 5, (6, n)).to(dtype)
    want = [row.index(max(row)) for row in logits.tolist()]
    assert kernels.argmax(logits).tolist() == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_argmax_says_which_rows_are_not_finite(kernels, dtype, bad):
    """Wherever in the row it is: in vectors, in what is left over, in the first or last block."""
    logits = torch.randn(6, 2093).to(dtype)
    want = logits.float().argmax(dim=-1)
    for row, at in ((1, 0), (2, 1023), (4, 2092)):
        logits[row, at] = bad
        want[row] = -1
    assert torch.equal(kernels.argmax(logits), want)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (40, 40), (1003, 1), (1003, 64), (49152, 50)])
def test_top_k_in_the_order_of_a_stable_sort(kernels, n, k):
    logits = torch.randint(-40, 40, (n,)).float()
    values, indices, lse = kernels.top_k(logits, k)
    order = sorted(range(n), key=lambda i: (-logits[i].item(), i))[:k]
    assert indices.tolist() == order
    assert torch.equal(values, logits[order])
    assert abs(lse - torch.logsumexp(logits, 0).item()) < 1e-4


def test_copied_pages_arrive_and_others_stay(kernels):
    source, target = torch.randn(9, 3, 37), torch.zeros(6, 3, 37)
    kernels.copy_pages(target, np.array([5, 0]), source, np.array([2, 8]))
    assert torch.equal(target[[5, 0]], source[[2, 8]])
    assert (target[1:5] == 0).all()


def test_bad_arguments_are_refused(kernels):
    packed = pack(torch.randn(16, 8))
    with pytest.raises(ValueError, match="8 inputs"):
        kernels.linear(torch.randn(2, 9), packed)
    with pytest.raises(ValueError, match="residual must be"):
        kernels.linear(torch.randn(2, 8), packed, residual=torch.randn(2, 8))
    with pytest.raises(TypeError, match="float16"):
        kernels.linear(torch.randn(2, 8).half(), packed)
    with pytest.raises(ValueError, match="multiple of 16"):
        pack_gate_up(torch.randn(8, 8), torch.randn(8, 8))
    with pytest.raises(ValueError, match="no rows of Q4_0"):
        BlockMatrix(torch.zeros((1, 17), dtype=torch.uint8), WeightFormat.Q4_0)
    with pytest.raises(ValueError, match="top_k"):
        kernels.top_k(torch.randn(3), 4)


def test_workspace_stops_growing(kernels):
    """No allocation in steady state."""
    packed = pack(torch.randn(64, 64).bfloat16())
    for rows in (300, 255, 8, 1):
        kernels.linear(torch.randn(rows, 64).bfloat16(), packed)
    grows = kernels.workspace_grows
    for rows in (1, 8, 300, 299, 33):
        kernels.linear(torch.randn(rows, 64).bfloat16(), packed)
    assert kernels.workspace_grows == grows


def test_more_threads_than_work_and_cores():
    """Late workers are not waited for, and no job is lost, with many more threads than cores."""
    native_library()
    many = NativeKernels(threads=9)
    x, w = torch.randn(5, 32), torch.randn(400, 32)
    packed, want = pack(w), x @ w.T
    for _ in range(300):
        assert torch.allclose(many.linear(x, packed), want, atol=1e-4)
    many.close()


def test_the_instruction_set_can_be_chosen(monkeypatch):
    native_library()
    monkeypatch.setenv("PHLOEM_CPU_ISA", "plain")
    assert NativeKernels(threads=1).isa is CpuIsa.PLAIN
    monkeypatch.setenv("PHLOEM_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match="known: auto, plain"):
        NativeKernels(threads=1)


def test_a_missing_library_is_a_clear_error(monkeypatch, tmp_path):
    native_abi.library.cache_clear()
    monkeypatch.setenv("PHLOEM_CPU_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(ConfigError, match="cannot load the native CPU kernels"):
        NativeKernels(threads=1)
    assert not native_abi.native_available()
    native_abi.library.cache_clear()
