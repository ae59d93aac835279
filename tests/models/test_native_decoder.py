"""The native decoder against the PyTorch one, through the real loading path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phloem.attention import LayeredAttention, RaggedBatch, ReferenceAttention, RowSpan
from phloem.attention.native import NativeAttention
from phloem.config.checkpoint import read_model_config
from phloem.kernels import ReferenceOps
from phloem.kernels.native import NativeKernels
from phloem.kernels.native_types import chain
from phloem.kv.layout import PageLayout, default_head_groups
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec
from phloem.models import Decoder, Quantisation, load_weights, native_base
from phloem.models.native_decoder import NativeDecoder
from phloem.models.packing import load_packed
from phloem.pools import DevicePool
from tests.kernels.native_build import native_library
from tests.models.checkpoints import FAMILIES, make_checkpoint

DTYPES = {KVDtype.FP32: torch.float32, KVDtype.BF16: torch.bfloat16}
POSITIONS = 256


@pytest.fixture(scope="module")
def kernels():
    native_library()
    context = NativeKernels(threads=2)
    yield context
    context.close()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    return folder


class Model:
    """One decoder with a pool of NaN of its own."""

    def __init__(self, path, dtype, *, kernels=None, quantisation=Quantisation.NONE, page_size=4):
        config = read_model_config(path)
        spec = KVSpec(
            kind=AttentionKind.GQA,
            dtype=dtype,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
        )
        layout = PageLayout(spec, 64, default_head_groups(config.num_kv_heads))
        pool = DevicePool(layout, device=torch.device("cpu"))
        pool.fill_nan(np.arange(64))
        self.page_size = page_size
        if kernels is None:
            backend = ReferenceAttention(pool.buffer)
            ops = ReferenceOps()
            weights = load_weights(path, config, dtype=DTYPES[dtype], device=torch.device("cpu"))
            self.decoder = Decoder(config, weights, ops=ops, num_positions=POSITIONS)
        else:
            backend = NativeAttention(pool.buffer, kernels)
            weights = load_packed(path, config, dtype=DTYPES[dtype], quantisation=quantisation)
            self.decoder = NativeDecoder(
                config, weights, kernels=kernels, buffers=[pool.buffer], num_positions=POSITIONS
            )
        self.attention = LayeredAttention([backend], config.component_layers)

    def logits(self, spans, tokens, **calls):
        batch = RaggedBatch(tuple(spans), self.page_size)
        hidden = self.decoder.forward(
            tokens,
            torch.from_numpy(batch.positions()),
            attention=self.attention,
            meta=self.attention.plan((batch,)),
            **{"on_layer": lambda: None, **calls},
        )
        return self.decoder.logits(hidden)


def steps():
    """A prefill; then its decode beside another row's prefill; then two decodes."""
    first, second = np.arange(40, 60)[::-1].copy(), np.arange(20)
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 320, 100))
    yield [RowSpan(0, 0, 37, first[:10])], tokens[:37]
    yield [RowSpan(0, 37, 1, first[:10]), RowSpan(1, 0, 21, second[:6])], tokens[37:59]
    yield [RowSpan(0, 38, 1, first[:10]), RowSpan(1, 21, 1, second[:6])], tokens[59:61]


def error(got, want):
    return float((got - want).abs().max() / want.abs().max())


def test_fp32_logits_equal_the_reference(checkpoint, kernels):
    native = Model(checkpoint, KVDtype.FP32, kernels=kernels)
    slow = Model(checkpoint, KVDtype.FP32)
    for spans, tokens in steps():
        assert error(native.logits(spans, tokens), slow.logits(spans, tokens)) < 1e-5


def test_bf16_logits_are_no_further_from_fp32_than_the_reference(checkpoint, kernels):
    """Both round; the native layers round less often, so they must not be worse by more than half.

    The standard is the fp32 reference on the same (bf16-rounded) checkpoint up to weight rounding.
    """
    native = Model(checkpoint, KVDtype.BF16, kernels=kernels)
    slow, exact = Model(checkpoint, KVDtype.BF16), Model(checkpoint, KVDtype.FP32)
    for spans, tokens in steps():
        want = exact.logits(spans, tokens)
        allowed = 1.5 * error(slow.logits(spans, tokens), want) + 5e-3
        assert error(native.logits(spans, tokens), want) < allowed


def test_int8_weights_stay_close(checkpoint, kernels):
    native = Model(checkpoint, KVDtype.FP32, kernels=kernels, quantisation=Quantisation.INT8)
    slow = Model(checkpoint, KVDtype.FP32)
    for spans, tokens in steps():
        got, want = native.logits(spans, tokens), slow.logits(spans, tokens)
        cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
        assert cosine.min() > 0.99


def test_a_row_does_not_depend_on_its_batch(checkpoint, kernels):
    """Bit for bit: a decode alone and beside a prefill gives the same logits."""
    models = [Model(checkpoint, KVDtype.BF16, kernels=kernels) for _ in range(2)]
    (prefill, ids), (both, both_ids), _ = steps()
    for model in models:
        model.logits(prefill, ids)
    alone = models[0].logits(both[:1], both_ids[:1])
    assert torch.equal(models[1].logits(both, both_ids)[:1], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.value)
def test_a_layer_in_two_calls_gives_the_same_bits(checkpoint, kernels, dtype):
    """As it is computed where somebody wants to know what has been written; and he is told of each
    layer in its order, before it is over."""
    one, two = (Model(checkpoint, dtype, kernels=kernels) for _ in range(2))
    for spans, tokens in steps():
        told = []
        got = two.logits(
            spans, tokens, on_written=told.append, on_layer=lambda told=told: told.append("over")
        )
        assert torch.equal(got, one.logits(spans, tokens))
        assert told == [x for layer in range(3) for x in (layer, "over")]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.value)
def test_all_layers_in_one_call_give_the_same_bits(checkpoint, kernels, dtype, monkeypatch):
    """As decodes are computed; a long pass goes layer by layer all the same, for the heartbeat."""
    one, two = (Model(checkpoint, dtype, kernels=kernels) for _ in range(2))
    made = []
    monkeypatch.setattr(kernels, "layer_forward", lambda *_: made.append("layer"))
    for spans, tokens in steps():
        told = []
        got = two.logits(spans, tokens, at_once=True, on_layer=lambda told=told: told.append(1))
        assert told == [1]
        assert not made
        with monkeypatch.context() as plain:
            plain.delattr(kernels, "layer_forward")
            assert torch.equal(got, one.logits(spans, tokens))
    monkeypatch.setattr(native_base, "_SHORT_PASS_BYTES", 0)
    two.logits(spans, tokens, at_once=True)
    assert made == ["layer"] * 3


def test_a_layer_without_a_batch_is_refused(checkpoint, kernels):
    model = Model(checkpoint, KVDtype.FP32, kernels=kernels)
    steps_ = chain([(*model.decoder._steps[0][:2], 1)])
    spans, tokens = next(steps())
    meta = model.attention.plan((RaggedBatch(tuple(spans), model.page_size),))
    with pytest.raises(ValueError, match="component 1 of 1"):
        kernels.layers_forward(steps_, meta, torch.zeros(len(tokens), 64))


def test_what_a_layer_keeps_between_its_calls_is_checked(checkpoint, kernels):
    model = Model(checkpoint, KVDtype.FP32, kernels=kernels)
    spans, _ = next(steps())
    (batch,) = model.attention.plan((RaggedBatch(tuple(spans), model.page_size),))
    layer, kv, _ = model.decoder._steps[0]
    hidden = torch.zeros(37, 64)
    for qkv in (torch.zeros(36, 128), torch.zeros(37, 4096)[:, ::2], torch.zeros(37, 8).double()):
        with pytest.raises(ValueError, match="qkv must be"):
            kernels.layer_project(layer, kv, batch, hidden, qkv)
