"""How an optimizer's state is stored: float32, bfloat16, or 8 bits an element.

The update itself is torch's own, on float32: a block of the state is decoded before it and encoded
after it. So a codec says what is kept between two steps, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, Protocol

import torch
import xxhash
from torch import Tensor

from swaptrain.program.roles import SCALE_ELEMENTS, state_array

__all__ = [
    "CODING_BYTES",
    "Codec",
    "Draws",
    "ShapeAndDtype",
    "StateDtype",
    "codec_of",
    "dynamic_map",
]
__all__ += ["is_coded", "round_in_pieces", "round_stochastically", "scales_of"]

StateDtype = Literal["float32", "bfloat16", "8bit"]
ShapeAndDtype = tuple[tuple[int, ...], str]
"""Of an array that holds one tensor."""

WEIGHT = "weight"
"""The name under which a weight that has no master is rounded."""
_LEAST_ELEMENTS = 4096
"""A parameter with fewer elements keeps float32: its state is nothing on the disk."""
_AT_ONCE = 1 << 19
"""Elements that are encoded at once: fewer take longer with two threads, as each has to wake up."""
_LEAST_SCALE = 1e-12
_NEVER_NEGATIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta", "exp_inf", "step_size"}
)
"""State that is no less than 0: its map has no codes for the other half."""


@dataclass(frozen=True)
class Draws:
    """What random bits are a function of, beside the element: they are drawn again at a resume."""

    seed: int
    step: int
    """The update, from 1."""
    parameter: str
    first: int = 0
    """The element of the parameter, in the order of its memory, that the tensors begin with; a
    multiple of 4."""

    def at(self, first: int) -> Draws:
        """Return the draws that begin so many elements further on."""
        return Draws(self.seed, self.step, self.parameter, self.first + first)


class Codec(Protocol):
    """Stores one tensor of an optimizer's state that has the parameter's shape."""

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, ShapeAndDtype]:
        """Return the arrays that hold the state tensor `name`, by name."""

    def decode(self, name: str, stored: Mapping[str, Tensor], block: slice, out: Tensor) -> None:
        """Write a block into `out`, float32 [elements]; it begins at a multiple of 256.

        `stored` holds each array as a 1-D tensor from the parameter's piece on.
        """

    def encode(
        self, name: str, values: Tensor, stored: Mapping[str, Tensor], block: slice, draws: Draws
    ) -> None:
        """Store a block of float32 `values`, [elements], which are overwritten."""


def codec_of(dtype: StateDtype) -> Codec | None:
    """Return what stores state in `dtype`; None: as torch has it."""
    return {"float32": None, "bfloat16": _BFloat16(), "8bit": _EightBit()}[dtype]


_PIECE = 1 << 17
"""Elements of 8-bit state that are encoded at once."""
CODING_BYTES = 20 * _AT_ONCE
"""What encoding allocates, at the most."""


def is_coded(shape: tuple[int, ...]) -> bool:
    """Whether the state of a parameter of this shape is stored by a codec, where there is one."""
    return prod(shape) >= _LEAST_ELEMENTS


class _BFloat16:
    """The upper halves of float32, rounded up or down by chance, as far as each is away.

    Rounded to the nearest, a moving average would stand still where a step changes it by less than
    half of the last place; rounded by chance it moves as it should, in the mean.
    """

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, ShapeAndDtype]:
        return {state_array(name, "bf16"): (shape, "bfloat16")}

    def decode(self, name: str, stored: Mapping[str, Tensor], block: slice, out: Tensor) -> None:
        out.copy_(stored[state_array(name, "bf16")][block])

    def encode(
        self, name: str, values: Tensor, stored: Mapping[str, Tensor], block: slice, draws: Draws
    ) -> None:
        out = stored[state_array(name, "bf16")][block]
        round_in_pieces(values, out, draws.at(block.start), name)


class _EightBit:
    """A code for each element and a float32 scale for 256 of them, in the order of memory.

    The maps, the scales and the rounding (to the nearest, ties up) are those of torchao's 8-bit
    optimizers; the maps are bitsandbytes' too, whose kernels divide less exactly and keep the sign
    of what rounds to zero. Source: Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", https://arxiv.org/abs/2110.02861, section 2.
    """

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, ShapeAndDtype]:
        scales = -(-prod(shape) // SCALE_ELEMENTS)
        return {
            state_array(name, "8bit"): (shape, "uint8"),
            state_array(name, "scale"): ((scales,), "float32"),
        }

    def decode(self, name: str, stored: Mapping[str, Tensor], block: slice, out: Tensor) -> None:
        table = _table(name not in _NEVER_NEGATIVE, out.device)

        def decode(piece: slice) -> None:
            codes, scales, values = _piece(name, stored, block, piece, out)
            table.decode(codes, values)
            for part, scale in _by_scale(values, scales):
                part.mul_(scale)

        _in_pieces(decode, out)

    def encode(
        self, name: str, values: Tensor, stored: Mapping[str, Tensor], block: slice, draws: Draws
    ) -> None:
        table = _table(name not in _NEVER_NEGATIVE, values.device)

        def encode(piece: slice) -> None:
            codes, scales, own = _piece(name, stored, block, piece, values)
            for part, scale in _by_scale(own, scales):
                _largest(part, scale, signed=table.signed)
                part.div_(scale.clamp_(min=_LEAST_SCALE))
            table.encode(own, codes)

        _in_pieces(encode, values)


def _piece(
    name: str, stored: Mapping[str, Tensor], block: slice, piece: slice, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, [n], scales, [ceil(n / 256)], and values, [n], of a piece of a block."""
    at = slice(block.start + piece.start, block.start + piece.stop)
    codes, scales = stored[state_array(name, "8bit")], stored[state_array(name, "scale")]
    return codes[at], scales[scales_of(at)], values[piece]


def _largest(rows: Tensor, out: Tensor, *, signed: bool) -> None:
    """Write the largest size of each row's elements, [rows, 1].

    Twice as fast as by their absolute values.
    """
    torch.amax(rows, dim=1, keepdim=True, out=out)
    if signed:
        torch.maximum(out, torch.amin(rows, dim=1, keepdim=True).neg_(), out=out)


def _in_pieces(work: Callable[[slice], None], values: Tensor) -> None:
    """Call `work` with pieces of `values`: what it makes on the way stays in a CPU's cache."""
    count = values.numel()
    size = _PIECE if values.device.type == "cpu" else 16 * _PIECE  # fewer kernels
    for start in range(0, count, size):
        work(slice(start, min(start + size, count)))


def scales_of(block: slice) -> slice:
    """Return which scales belong to a block of elements that begins at a multiple of 256."""
    return slice(block.start // SCALE_ELEMENTS, -(-block.stop // SCALE_ELEMENTS))


def _by_scale(values: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the elements as rows of those that share a scale, [rows, 256] and [rows, 1].

    The last ones, where they are fewer, are a row of their own.
    """
    whole, rest = divmod(values.numel(), SCALE_ELEMENTS)
    parts = []
    if whole:
        parts.append(
            (
                values[: whole * SCALE_ELEMENTS].view(whole, SCALE_ELEMENTS),
                scales[:whole].view(-1, 1),
            )
        )
    if rest:
        parts.append((values[whole * SCALE_ELEMENTS :].view(1, rest), scales[whole:].view(1, 1)))
    return parts


class _Table:
    """A map of 256 values, ascending, and a way to the nearest one that takes one look-up.

    The bits of a float, of a negative one inverted but for the sign, are whole numbers in the order
    of the floats. Their upper 16 bits say the code up to one. So `_steps` has for these the code of
    the smallest such float times 2^16, and what is to be added to the lower 16 bits for a carry
    where the code is one more.
    """

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.signed = bool(values[0] < 0)
        self.values = values.to(device)
        thresholds = _in_order(_thresholds(values)[:-1])
        first = -(1 << 15) if self.signed else 0
        # [2^15], signed [2^16]: as `_steps`
        smallest = torch.arange(first, 1 << 15, dtype=torch.int64) << 16
        base = torch.bucketize(smallest, thresholds, right=True)
        assert int((torch.bucketize(smallest | 0xFFFF, thresholds, right=True) - base).max()) <= 1
        ahead = torch.cat([thresholds, thresholds.new_tensor([1 << 40])])[base] - smallest
        carry = (1 << 16) - ahead.clamp(max=1 << 16)
        self._steps = ((base << 16) + carry).to(torch.int32).to(device)

    def decode(self, codes: Tensor, out: Tensor) -> None:
        """Write the values of codes, [n] both."""
        torch.index_select(self.values, 0, codes.int(), out=out)

    def encode(self, values: Tensor, codes: Tensor) -> None:
        """Write the code of the nearest value of each element, of two the upper one.

        The values, [n], between -1 and 1, are overwritten.
        """
        bits = values.view(torch.int32)
        if self.signed:
            bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
        upper = bits >> 16
        if self.signed:
            upper.add_(1 << 15)
        else:
            upper.clamp_(min=0)  # of NaN alone, whose sign may be set
        found = self._steps.index_select(0, upper)
        codes.copy_(found.add_(bits.bitwise_and_(0xFFFF)).bitwise_right_shift_(16))


def _in_order(values: Tensor) -> Tensor:
    """Return float32 as whole numbers in the same order, int64."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@cache
def _table(signed: bool, device: torch.device) -> _Table:
    return _Table(dynamic_map(signed=signed), device)


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of a code, float32 [256], ascending, between -1 or 0 and 1.

    7 exponents by powers of ten, each with twice as many steps as the one below, the middles of
    equal parts of 0.1 to 1. Source: bitsandbytes' `create_dynamic_map` (the same in torchao).
    """
    bits, found = 7, []
    for exponent in range(bits):
        steps = 2 ** (exponent + 8 - bits - 1) + 1 if signed else 2 ** (exponent + 8 - bits) + 1
        edges = torch.linspace(0.1, 1, steps)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scaled = (10 ** (-(bits - 1) + exponent)) * middles
        found += scaled.tolist()
        if signed:
            found += (-scaled).tolist()
    return torch.tensor(sorted([*found, 0.0, 1.0]))


def _thresholds(values: Tensor) -> Tensor:
    """Return for each code the smallest float that is nearer to the next value, ties included.

    Found by the rule itself, in float32: `x - below >= (above - below) / 2`.
    """
    below, above = values[:-1], values[1:]  # [255]
    half = (above - below) * 0.5
    found = below + half
    nan = torch.full_like(found, float("nan"))
    for _ in range(4):  # rounding may have missed it by a place or two
        lower = torch.nextafter(found, nan.new_tensor(float("-inf")).expand_as(found))
        found = torch.where(lower - below >= half, lower, found)
    for _ in range(4):
        upper = torch.nextafter(found, nan.new_tensor(float("inf")).expand_as(found))
        found = torch.where(found - below >= half, found, upper)
    return torch.cat([found, nan.new_tensor([float("inf")])])


def round_in_pieces(values: Tensor, out: Tensor, draws: Draws, name: str) -> None:
    """Do as `round_stochastically`, with little memory."""
    for start in range(0, values.numel(), _AT_ONCE):
        piece = slice(start, start + _AT_ONCE)
        round_stochastically(values[piece], out[piece], draws.at(start), name)


def round_stochastically(values: Tensor, out: Tensor, draws: Draws, name: str) -> None:
    """Write float32 `values`, [n], to bfloat16 `out`, rounded up with the chance of the rest.

    `values` are overwritten. 16 random bits are added to the lower half, and the upper one is kept.
    """
    bits = values.view(torch.int32)
    halves = _random_halves(values.numel(), draws, name, values.device)
    bits.add_(halves.masked_fill_(values.isnan(), 0))  # a carry would make a number of NaN
    out.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def _random_halves(count: int, draws: Draws, name: str, device: torch.device) -> Tensor:
    """Return `count` random numbers of 16 bits, int32, [n]: functions of the draws and the element.

    Of each number of 64 bits, which SplitMix64 makes of a counter, come four. Source: Steele, Lea,
    Flood, "Fast splittable pseudorandom number generators", https://doi.org/10.1145/2714064.2660195
    """
    assert draws.first % 4 == 0
    text = f"{draws.seed} {draws.step} {draws.parameter} {name}"
    key = xxhash.xxh3_64_intdigest(text.encode())
    first = draws.first // 4
    # [ceil(count / 4)]
    mixed = torch.arange(first, first + -(-count // 4), dtype=torch.int64, device=device)
    mixed.mul_(_signed(0x9E3779B97F4A7C15)).add_(_signed(key))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(_signed(factor))
    mixed.bitwise_xor_(_shifted(mixed, 31))
    return mixed.view(torch.int16)[:count].int().bitwise_and_(0xFFFF)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Return the bits moved down, zeros behind them."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    """Return 64 bits as int64 has them."""
    bits %= 1 << 64
    return bits - (1 << 64) if bits >> 63 else bits
