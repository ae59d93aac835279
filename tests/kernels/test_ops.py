"""The fast ops against the reference ones, on random shapes."""

from __future__ import annotations

import pytest
import torch

from phloem.core.errors import ConfigError
from phloem.kernels import (
    ReferenceOps,
    Scoring,
    TorchOps,
    add_sinks,
    make_ops,
    merge_partials,
    torch_ops,
)

FAST, SLOW = TorchOps(), ReferenceOps()
PLAIN = Scoring(8**-0.5)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = sorted(TOLERANCES, key=str)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    assert got.dtype == want.dtype
    scale = max(float(want.float().abs().max()), 1.0)
    return bool(((got.float() - want.float()).abs().max() / scale) < TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, rows, bias):
    x, w = torch.randn(rows, 48).to(dtype), torch.randn(56, 48).to(dtype)
    b = torch.randn(56).to(dtype) if bias else None
    assert close(FAST.linear(x, w, b), SLOW.linear(x, w, b), dtype)


def test_widened_linear_is_exact_over_block_borders(monkeypatch):
    """bf16 products summed in fp32 and rounded once, however many blocks of weights there are."""
    monkeypatch.setattr(torch_ops, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr(torch_ops, "WIDEN_BYTES", 4 * 48 * 10)
    x, w = torch.randn(9, 48).bfloat16(), torch.randn(56, 48).bfloat16()
    b = torch.randn(56).bfloat16()
    want = (x.double() @ w.double().T + b.double()).bfloat16()
    assert close(FAST.linear(x, w, b), want, torch.bfloat16)
    assert (FAST.linear(x, w, b) == want).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 64), (4, 3, 8)])
def test_rms_norm(dtype, shape):
    x, w = torch.randn(shape).to(dtype) * 3, torch.rand(shape[-1]).to(dtype)
    assert close(FAST.rms_norm(x, w, 1e-5), SLOW.rms_norm(x, w, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_on_a_strided_view(dtype):
    whole = torch.randn(6, 5, 16).to(dtype)
    angles = torch.randn(6, 8)
    want = SLOW.rope(whole[:, :3], angles.cos(), angles.sin())
    rest = whole[:, 3:].clone()
    assert close(FAST.rope(whole[:, :3], angles.cos(), angles.sin()), want, dtype)
    assert torch.equal(whole[:, 3:], rest), "the values next to q and k must stay"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype):
    gate_up = torch.randn(7, 40).to(dtype) * 4
    assert close(FAST.silu_mul(gate_up.clone()), SLOW.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh_mul(dtype):
    gate_up = torch.randn(7, 40).to(dtype) * 4
    got, want = FAST.gelu_tanh_mul(gate_up.clone()), SLOW.gelu_tanh_mul(gate_up)
    assert close(got, want, dtype)


def test_a_norm_with_wide_weights_rounds_once():
    """Weights a hair above 1, as (1 + w) gives: in bf16 they would all be 1."""
    x, w = torch.randn(5, 64).bfloat16(), 1 + torch.rand(64) / 300
    want = SLOW.rms_norm(x, w, 1e-5)
    got = FAST.rms_norm(x, w, 1e-5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert not torch.equal(got, FAST.rms_norm(x, w.bfloat16(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (5, 9), (1, 1, 5, 9)], ids=str)
def test_attend_under_a_mask(dtype, softcap, shape, monkeypatch):
    """Of keys and of pairs, with the softcap before it and a block border inside."""
    monkeypatch.setattr(torch_ops, "SCORES_BYTES", 4 * 2 * 3 * 9 * 2)
    q = torch.randn(2, 3, 5, 8).to(dtype)
    k, v = torch.randn(2, 2, 3, 9, 8).to(dtype)
    mask = torch.where(torch.rand(shape) < 0.4, -torch.inf, 0.0).to(dtype)
    mask[..., 0] = 0.0
    scoring = Scoring(0.5, softcap)
    out, lse = FAST.attend(q, k, v, scoring, mask=mask)
    want, want_lse = SLOW.attend(q, k, v, scoring, mask=mask)
    assert close(out, want, dtype)
    assert torch.allclose(lse, want_lse, atol=TOLERANCES[dtype], rtol=1e-5)


def test_sinks_join_the_softmax():
    scores, values = torch.randn(2, 3, 4, 7), torch.randn(2, 3, 7, 8)
    sinks = torch.randn(3) * 2
    out, lse = torch.softmax(scores, -1) @ values, torch.logsumexp(scores, -1)
    whole = torch.cat((scores, sinks.view(3, 1, 1).expand(2, 3, 4, 1)), -1)
    want = torch.softmax(whole, -1)[..., :7] @ values
    assert torch.allclose(add_sinks(out, lse, sinks.view(3, 1)), want, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [False, True], ids=["fused", "blocks"])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(5, 9, False), (7, 7, True), (1, 33, False)]
)
def test_attend_and_its_lse(dtype, blocks, queries, keys, causal, monkeypatch):
    """Also of the path without a fused kernel, with a block border inside."""
    monkeypatch.setattr(torch_ops, "SCORES_BYTES", 4 * 2 * 3 * keys * 2)
    q = torch.randn(2, 3, queries, 8).to(dtype)
    k, v = torch.randn(2, 2, 1, keys, 8).to(dtype).expand(2, 2, 3, keys, 8)
    out, lse = (
        torch_ops._attend_in_blocks(q, k, v, PLAIN, causal=causal, mask=None)
        if blocks
        else FAST.attend(q, k, v, PLAIN, causal=causal)
    )
    want, want_lse = SLOW.attend(q, k, v, PLAIN, causal=causal)
    assert close(out, want, dtype)
    assert lse.dtype == torch.float32
    assert torch.allclose(lse, want_lse, atol=TOLERANCES[dtype], rtol=1e-5)


def test_merged_halves_equal_the_whole():
    q = torch.randn(2, 3, 4, 8)
    k, v = torch.randn(2, 2, 3, 11, 8)
    whole, whole_lse = SLOW.attend(q, k, v, PLAIN)
    first = SLOW.attend(q, k[:, :, :6], v[:, :, :6], PLAIN)
    second = SLOW.attend(q, k[:, :, 6:], v[:, :, 6:], PLAIN)
    out, lse = merge_partials(*first, *second)
    assert torch.allclose(out, whole, atol=1e-6)
    assert torch.allclose(lse, whole_lse, atol=1e-6)


def test_an_empty_part_weighs_nothing_even_if_it_holds_nan():
    out, lse = torch.randn(2, 3, 8), torch.randn(2, 3)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for parts in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge_partials(*parts)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    both, both_lse = merge_partials(*nothing, *nothing)
    assert torch.equal(both, torch.zeros_like(out))
    assert bool(torch.isneginf(both_lse).all())


def test_unknown_ops_are_refused():
    with pytest.raises(ConfigError, match="unknown ops 'cuda'"):
        make_ops("cuda")
