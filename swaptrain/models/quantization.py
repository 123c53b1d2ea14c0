"""Weights to codes and scales, and back.

`nf4` is the 4-bit NormalFloat of Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs",
2023, appendix E, in blocks of 64: codes, scales and decoded weights are those of bitsandbytes, bit
for bit. `int8` is symmetric and by rows: scale = max |row| / 127, code = round(weight / scale).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swaptrain.program.quantized import NF4_BLOCK, QuantizedAs
from swaptrain.store.format.bfloat16 import numpy_dtype

__all__ = ["decode", "decoded_pieces", "encode", "rounded", "to_numpy"]

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_LEAST_SCALE = 1e-38
"""Of a block of zeros, as in bitsandbytes."""
_INT8_LARGEST = 127
_AT_A_TIME = 1 << 18
"""Weights that are coded at a time on a processor: they stay in its cache."""


def encode(weight: Tensor, form: QuantizedAs, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and the scales of a weight, which `quantized_tensors` describes.

    `weight` [..., columns] lies in row-major order. Raises ValueError for numbers that are not
    finite: no code says what they were.
    """
    unit = _unit(weight, form)
    flat, codes, scales = weight.detach().reshape(-1), codes.view(-1), scales.view(-1)
    step = unit * max(1, _AT_A_TIME // unit)
    for first in range(0, len(flat), step):
        part = flat[first : first + step].float()
        if not part.isfinite().all():
            raise ValueError("a weight is not finite")
        to = scales[first // unit :][: -(-len(part) // unit)]
        if form == "int8":
            rows = part.view(-1, unit)
            torch.div(rows.abs().amax(1), _INT8_LARGEST, out=to)
            divisor = torch.where(to == 0, 1.0, to)[:, None]
            # A scale that is subnormal is rounded itself: what it divides may be more than 127.
            nearest = (rows / divisor).round_().clamp_(-_INT8_LARGEST, _INT8_LARGEST)
            codes[first : first + step] = nearest.flatten()
        else:
            codes[first // 2 : (first + len(part) + 1) // 2] = _nf4_codes(part, to)


def decode(codes: Tensor, scales: Tensor, form: QuantizedAs, target: Tensor) -> None:
    """Write the weights that codes and scales stand for, each as float32 rounded to the target's.

    `target` [..., columns] lies in row-major order.
    """
    unit = _unit(target, form)
    flat, codes, scales = target.view(-1), codes.view(-1), scales.view(-1)
    step = unit * max(1, _AT_A_TIME // unit) if target.device.type == "cpu" else max(1, len(flat))
    for first in range(0, len(flat), step):
        out = flat[first : first + step]
        scale = scales[first // unit :][: -(-len(out) // unit)]
        if form == "int8":
            torch.mul(codes[first : first + step].view(-1, unit), scale[:, None],
                      out=out.view(-1, unit))  # fmt: skip
            continue
        some = codes[first // 2 : (first + len(out) + 1) // 2]
        values = _pairs(codes.device).index_select(0, some.int()).view(torch.float32)[: len(out)]
        whole = len(out) - len(out) % unit
        torch.mul(values[:whole].view(-1, unit), scale[: whole // unit, None],
                  out=out[:whole].view(-1, unit))  # fmt: skip
        if whole < len(out):
            torch.mul(values[whole:], scale[-1], out=out[whole:])


def decoded_pieces(
    codes: Iterable[NDArray[Any]],
    scales: NDArray[np.float32],
    form: QuantizedAs,
    shape: Sequence[int],
    dtype: str,
) -> Iterator[NDArray[Any]]:
    """Yield the weights of a `shape` in row-major order, flat, from their codes, which come so."""
    unit, left = shape[-1] if form == "int8" else NF4_BLOCK, prod(shape)
    per_unit = unit if form == "int8" else unit // 2
    table, rest, first = torch.from_numpy(scales), list[NDArray[Any]](), 0
    for piece in chain(codes, [None]):
        rest += [] if piece is None else [piece]
        units = sum(map(len, rest)) // per_unit if piece is not None else len(scales) - first
        if not units:
            continue
        flat = np.concatenate(rest)
        rest = [flat[units * per_unit :]]
        numel = min(units * unit, left)
        out = torch.empty(
            (numel // unit, unit) if form == "int8" else numel, dtype=getattr(torch, dtype)
        )
        some = torch.from_numpy(flat[: units * per_unit])
        decode(some, table[first : first + units], form, out)
        first, left = first + units, left - numel
        yield to_numpy(out)


def rounded(weight: Tensor, form: QuantizedAs) -> Tensor:
    """Return what is left of a weight that was coded: the weights that its codes stand for."""
    n, unit = weight.numel(), _unit(weight, form)
    length, dtype = (n, torch.int8) if form == "int8" else (-(-n // 2), torch.uint8)
    codes, scales = torch.empty(length, dtype=dtype), torch.empty(-(-n // unit))
    encode(weight, form, codes, scales)
    target = torch.empty(weight.shape, dtype=weight.dtype)
    decode(codes, scales, form, target)
    return target


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's elements in row-major order, flat; bfloat16 as numpy has it."""
    flat = tensor.contiguous().flatten()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    found: NDArray[Any] = flat.numpy()
    return found


def _unit(weight: Tensor, form: QuantizedAs) -> int:
    """Return how many weights share a scale."""
    return weight.shape[-1] if form == "int8" else NF4_BLOCK


def _nf4_codes(part: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of weights, float32 [n], two a byte; write their scales."""
    whole = len(part) - len(part) % NF4_BLOCK
    blocks, rest = part[:whole].view(-1, NF4_BLOCK), part[whole:]
    most = blocks.abs().amax(1)
    scales[: len(most)] = most
    scaled = (blocks * (1.0 / most.clamp(min=_LEAST_SCALE))[:, None]).flatten()
    if len(rest):
        scales[-1] = most = rest.abs().amax().clamp(min=_LEAST_SCALE)
        scaled = torch.cat([scaled, rest / most])
    if len(scaled) % 2:
        scaled = torch.cat([scaled, scaled.new_zeros(1)])
    nearest = torch.bucketize(scaled.clamp_(-1, 1), _middles(), out_int32=True).to(torch.uint8)
    return (nearest[::2] << 4) | nearest[1::2]


@cache
def _middles() -> Tensor:
    """Between which numbers a code is the nearest; float32 [15]."""
    values = torch.tensor(_NF4)
    return (values[:-1] + values[1:]) / 2


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte of codes, as one number of 64 bits; int64 [256]."""
    values = torch.tensor(_NF4)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte >> 4], values[byte & 15]], dim=1)
    return pairs.view(torch.int64).flatten().to(device)
