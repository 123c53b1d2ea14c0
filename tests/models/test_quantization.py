"""Codes and scales of weights: bitsandbytes' bits, and a plain formula's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from swaptrain.models.quantization import decode, decoded_pieces, encode, rounded, to_numpy
from swaptrain.program.quantized import QuantizedAs, quantized_tensors
from swaptrain.program.tensors import TensorSpec, contiguous

SHAPES = [(64, 64), (7, 65), (3, 5), (2, 33, 130), (1, 1), (700, 900)]
DTYPES = [torch.float32, torch.bfloat16]


def weight_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers of many sizes, a row of zeros among them."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    weight *= torch.logspace(-6, 3, shape[-1])
    if len(weight) > 1:
        weight[0] = 0
    return weight.to(dtype)


def coded(weight: Tensor, form: QuantizedAs) -> tuple[Tensor, Tensor]:
    dtype = str(weight.dtype).removeprefix("torch.")
    shape = tuple(weight.shape)
    stored = quantized_tensors(TensorSpec("w", shape, contiguous(shape), dtype), form)
    codes, scales = (torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in stored.values())
    encode(weight, form, codes, scales)
    return codes, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_has_the_bits_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="bitsandbytes, the yardstick, is not installed"
    )
    weight = weight_of(shape, dtype)
    codes, scales = coded(weight, "nf4")
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(theirs.flatten(), codes)
    assert torch.equal(state.absmax, scales)
    ours = torch.empty_like(weight)
    decode(codes, scales, "nf4", ours)
    assert torch.equal(functional.dequantize_4bit(theirs, state), ours)


RECORDED = {
    torch.float32: ("13efa3a5468a2581", "c67584acb919427a", "07090beb20fe5a26"),
    torch.bfloat16: ("d804c52b1e3edbfa", "d1dfb1e7864bc999", "92d176d3664786d1"),
}
"""xxh3-64 of the codes, the scales and the decoded weights, in float32, of bitsandbytes 0.50.2."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_has_the_bits_that_bitsandbytes_was_seen_to_give(dtype: torch.dtype) -> None:
    """64,000 numbers of seven sizes, each exact in float32."""
    n = np.arange(64_000, dtype=np.uint64)
    mixed = (n * 2654435761) % (1 << 32)
    numbers = (mixed >> 9).astype(np.float32) / np.float32(2**23) - np.float32(0.5)
    numbers *= np.float32(2) ** (n % 7).astype(np.float32)
    weight = torch.from_numpy(numbers).reshape(250, 256).to(dtype)
    codes, scales = coded(weight, "nf4")
    ours = torch.empty_like(weight)
    decode(codes, scales, "nf4", ours)
    found = [xxhash.xxh3_64_hexdigest(t.numpy().tobytes()) for t in (codes, scales, ours.float())]
    assert tuple(found) == RECORDED[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_takes_the_nearest_value(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each block of 64 is its largest magnitude times the nearest of the sixteen numbers."""
    values = decode_byte_values()
    assert len(values) == 16 and all(a < b for a, b in pairwise(values.tolist()))
    assert values[0] == -1 and values[7] == 0 and values[15] == 1
    weight = weight_of(shape, dtype)
    for block, back in zip(
        weight.flatten().split(64), rounded(weight, "nf4").flatten().split(64), strict=True
    ):
        largest = block.float().abs().max()
        if largest == 0:
            assert not back.any()
            continue
        scaled = (block.float() / largest).double()
        nearest = (scaled[:, None] - values[None].double()).abs().min(dim=1).values
        taken = (back.double() / largest - scaled).abs()
        assert (taken <= nearest + 2.0**-8).all()


def decode_byte_values() -> Tensor:
    """The sixteen numbers, as decoding gives them for a scale of one."""
    codes = torch.tensor([(2 * i) << 4 | (2 * i + 1) for i in range(8)], dtype=torch.uint8)
    found = torch.empty(16)
    decode(codes, torch.ones(1), "nf4", found)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_the_plain_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = weight_of(shape, dtype)
    codes, scales = coded(weight, "int8")
    rows = weight.float().reshape(-1, shape[-1])
    expected = rows.abs().max(dim=1).values / 127
    assert torch.equal(scales, expected)
    whole = torch.where(expected == 0, 1, expected)[:, None]
    assert torch.equal(codes.view(rows.shape), (rows / whole).round().to(torch.int8))
    back = torch.empty_like(weight)
    decode(codes, scales, "int8", back)
    assert torch.equal(back.view(rows.shape), (codes.view(rows.shape) * scales[:, None]).to(dtype))


def test_int8_of_subnormal_numbers_keeps_their_signs() -> None:
    """The scale of 178 of the least numbers is one of them, and 178 is no int8."""
    least = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    weight = torch.tensor([[178.0, -178.0, 1.0]]) * least
    codes, _ = coded(weight, "int8")
    assert codes.tolist() == [[127, -127, 1]]


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_by_pieces_it_is_the_same(shape: tuple[int, ...], form: QuantizedAs) -> None:
    weight = weight_of(shape, torch.bfloat16)
    codes, scales = coded(weight, form)
    flat = codes.flatten().numpy()
    for length in (1, 31, 32, 1000):
        pieces = [flat[first : first + length] for first in range(0, len(flat), length)]
        found = list(decoded_pieces(pieces, scales.numpy(), form, shape, "bfloat16"))
        whole = np.concatenate(found).view(np.int16)
        assert np.array_equal(whole, to_numpy(rounded(weight, form)).view(np.int16))


@pytest.mark.parametrize("form", ["int8", "nf4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(form: QuantizedAs, number: float) -> None:
    weight = torch.ones(4, 70)
    weight[3, 69] = number
    with pytest.raises(ValueError, match="a weight is not finite"):
        coded(weight, form)
