"""Packed rows: every byte follows from its own row, and is the nearest code there is."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from phloem.core.errors import ConfigError
from phloem.kernels import make_codec
from phloem.kernels.codec import PackedCodec
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec

PACKED = [d for d in KVDtype if d.is_packed]
# Largest error over the largest number that shares its scale.
WORST = {KVDtype.INT8: 0.5 / 127 * 1.01, KVDtype.FP8: 2**-4 * 1.01, KVDtype.FP4: 1 / 6 * 1.07}
# Root mean square error of normal numbers over their own, measured, and a little room.
TYPICAL = {KVDtype.INT8: (0.004, 0.009), KVDtype.FP8: (0.02, 0.03), KVDtype.FP4: (0.07, 0.09)}


def codec_of(dtype: KVDtype, *parts: int, compute: torch.dtype = torch.float32) -> PackedCodec:
    latent = len(parts) == 2
    spec = KVSpec(
        kind=AttentionKind.MLA if latent else AttentionKind.GQA,
        dtype=dtype,
        num_layers=1,
        num_kv_heads=1,
        head_dim=sum(parts),
        rope_dim=parts[1] if latent else 0,
        page_size=1,
    )
    codec = make_codec(spec, compute)
    assert isinstance(codec, PackedCodec)
    return codec


def rows_of(count: int, width: int, seed: int = 0) -> torch.Tensor:
    """Rows whose sizes are thousands of times apart."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-3, 2, (count, 1))
    return torch.from_numpy(rng.normal(size=(count, width)) * sizes).float()


def bf16_up(x: float) -> float:
    """The smallest bf16 number that is not below x."""
    bits = struct.unpack("<I", struct.pack("<f", np.float32(x)))[0]
    bits = (bits + 0xFFFF) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def e4m3(byte: int) -> float:
    """From the definition: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7F is NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return (-size if sign else size) if byte & 0x7F != 0x7F else math.nan


def e5m3(byte: int) -> float:
    """5 bits of exponent (bias 15), 3 of mantissa, no sign."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa / 8 * 2**-14 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 15)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x: float, values: list[float]) -> float:
    return min(abs(x - v) for v in values)


@pytest.mark.parametrize("width", [16, 64, 80])
def test_int8_is_the_nearest_multiple_of_the_rows_scale(width):
    rows, codec = rows_of(40, width), codec_of(KVDtype.INT8, width)
    stored = codec.encode(rows).numpy()
    assert stored.shape == (40, width + 2)
    for row, data in zip(rows.double().numpy(), stored, strict=True):
        scale = struct.unpack("<f", b"\0\0" + data[width:].tobytes())[0]
        assert scale == bf16_up(np.float32(np.abs(row).max()) / np.float32(127))
        codes = data[:width].view(np.int8)
        assert np.abs(codes).max() in (126, 127)
        assert np.abs(codes * scale - row).max() <= scale / 2 * (1 + 1e-6)


@pytest.mark.parametrize("width", [16, 64])
def test_fp8_is_the_nearest_e4m3_number_in_units_of_the_rows_scale(width):
    rows, codec = rows_of(20, width), codec_of(KVDtype.FP8, width)
    table = [e4m3(b) for b in range(256) if not math.isnan(e4m3(b))]
    for row, data in zip(rows.double().numpy(), codec.encode(rows).numpy(), strict=True):
        scale = struct.unpack("<f", b"\0\0" + data[width:].tobytes())[0]
        assert scale == bf16_up(np.float32(np.abs(row).max()) / np.float32(448))
        for x, code in zip(row, data[:width], strict=True):
            error = abs(x / scale - e4m3(int(code)))
            assert error <= nearest(x / scale, table) + 1e-6 * abs(x / scale)


@pytest.mark.parametrize("width", [16, 64])
def test_fp4_is_the_nearest_e2m1_number_at_the_best_scale(width):
    rows, codec = rows_of(40, width), codec_of(KVDtype.FP4, width)
    table = [*E2M1, *(-v for v in E2M1)]
    stored = codec.encode(rows).numpy()
    assert stored.shape == (40, width // 2 + width // 16)
    for row, data in zip(rows.double().numpy(), stored, strict=True):
        for number, block in enumerate(row.reshape(-1, 16)):
            scale = e5m3(int(data[width // 2 + number]))
            exact = np.abs(block).max() / 6
            first = min(range(0xF8), key=lambda b, exact=exact: abs(e5m3(b) - exact))
            # by way of fp16, so where two are as near it may begin with either
            assert first - 2 <= data[width // 2 + number] <= first + 6
            surely = [e5m3(b) for b in range(first, first + 5)]
            errors = [sum((nearest(x / s, table) * s) ** 2 for x in block) for s in surely]
            mine = sum((nearest(x / scale, table) * scale) ** 2 for x in block)
            assert mine <= min(errors) * (1 + 1e-5)
            packed = data[8 * number : 8 * number + 8]
            codes = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1)
            for x, code in zip(block / scale, codes, strict=True):
                held = E2M1[code & 7] * (-1 if code & 8 else 1)
                assert abs(x - held) <= nearest(x, table) + 1e-6


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_reading_is_the_definition_of_every_byte(dtype, compute):
    """Random bytes: code times scale, rounded once."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (300, dtype.part_bytes(32)), dtype=np.uint8)
    got = codec_of(dtype, 32, compute=compute).decode(torch.from_numpy(data))
    assert got.dtype is compute
    exact = np.array([definition(dtype, row) for row in data])
    with np.errstate(over="ignore"):
        want = torch.from_numpy(exact.astype(np.float32)).to(compute)
    # a scale of random bits may overflow, or be a NaN: then so is the product
    assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), want.nan_to_num(7.0, 8.0, 9.0))


def definition(dtype: KVDtype, data: np.ndarray) -> list[float]:
    if dtype is KVDtype.FP4:
        packed = data[:16]
        codes = np.stack((packed & 15, packed >> 4), axis=1).reshape(-1)
        scales = [
            e5m3(int(b)) if b < 0xF8 else (math.inf if b == 0xF8 else math.nan) for b in data[16:]
        ]
        numbers = [E2M1[c & 7] * (-1 if c & 8 else 1) for c in codes]
        with np.errstate(all="ignore"):
            return [float(np.float64(n) * scales[i // 16]) for i, n in enumerate(numbers)]
    scale = struct.unpack("<f", b"\0\0" + data[32:].tobytes())[0]
    codes = data[:32]
    numbers = (
        codes.view(np.int8).tolist() if dtype is KVDtype.INT8 else [e4m3(int(c)) for c in codes]
    )
    with np.errstate(all="ignore"):
        return [float(np.float64(n) * scale) for n in numbers]


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_the_error_is_what_the_dtype_costs_and_not_more(dtype):
    rows = rows_of(200, 64)
    codec = codec_of(dtype, 64)
    error = (codec.decode(codec.encode(rows)) - rows).abs()
    span = 16 if dtype is KVDtype.FP4 else 64
    largest = rows.abs().view(200, -1, span).amax(dim=-1, keepdim=True)
    assert float((error.view(200, -1, span) / largest).max()) <= WORST[dtype]
    low, high = TYPICAL[dtype]
    assert low < float((error.norm(dim=1) / rows.norm(dim=1)).mean()) < high


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_a_row_is_encoded_on_its_own(dtype):
    """Whatever chunk it comes in, and whichever heads are beside it: to the last bit."""
    rows, codec = rows_of(63, 64).view(21, 3, 64), codec_of(dtype, 64)
    whole = codec.encode(rows)
    for cut in (1, 2, 5, 16):
        parts = [codec.encode(part) for part in rows.split(cut)]
        assert torch.equal(torch.cat(parts), whole)
    heads = [codec.encode(rows[:, h].contiguous()) for h in range(3)]
    assert torch.equal(torch.stack(heads, dim=1), whole)


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_rows_of_zeros_and_single_numbers_and_bf16(dtype):
    codec = codec_of(dtype, 32)
    rows = torch.zeros(3, 32)
    rows[1, 5] = -3.0
    back = codec.decode(codec.encode(rows))
    assert torch.equal(back == 0, rows == 0)
    assert float(back[1, 5]) == pytest.approx(-3.0, rel=2**-7)
    wide = rows_of(5, 32).to(torch.bfloat16)
    assert torch.equal(codec.encode(wide), codec.encode(wide.float()))


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_zero_bytes_are_zeros_and_poison_is_nan(dtype):
    codec = codec_of(dtype, 32)
    size = dtype.part_bytes(32)
    assert bool((codec.decode(torch.zeros(2, size, dtype=torch.uint8)) == 0).all())
    assert bool(codec.decode(torch.full((2, size), 0xFF, dtype=torch.uint8)).isnan().all())


@pytest.mark.parametrize("dtype", PACKED, ids=lambda d: d.value)
def test_a_latent_and_its_rotary_key_have_scales_of_their_own(dtype):
    """A rotary part a thousand times as large costs the latent nothing."""
    rows = rows_of(10, 48)
    loud = rows.clone()
    loud[:, 32:] *= 1000
    codec, alone = codec_of(dtype, 32, 16), codec_of(dtype, 32)
    size = dtype.part_bytes(32)
    assert torch.equal(codec.encode(loud)[:, :size], codec.encode(rows)[:, :size])
    assert torch.equal(codec.encode(loud)[:, :size], alone.encode(rows[:, :32].contiguous()))
    assert torch.equal(
        codec.decode(codec.encode(loud))[:, :32], codec.decode(codec.encode(rows))[:, :32]
    )


def test_rows_that_blocks_do_not_divide_are_refused():
    with pytest.raises(
        ConfigError, match="a scale for 16 numbers, which does not divide rows of 24"
    ):
        codec_of(KVDtype.FP4, 24)
    with pytest.raises(ConfigError, match="does not divide rows of 32 and 8"):
        codec_of(KVDtype.FP4, 32, 8)
