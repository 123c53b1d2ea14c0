"""What is stored of an optimizer's state, against the published formulas, element by element."""

from __future__ import annotations

import math

import pytest
import torch
import xxhash
from torch import Tensor

from swaptrain.compute import state_codecs
from swaptrain.compute.state_codecs import Draws, codec_of, dynamic_map, round_stochastically

DRAWS = Draws(seed=3, step=7, parameter="layer.weight")


def torchao_codes(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise whole blocks as torchao's `scale_tensor` and `quantize_8bit_with_qmap` say it.

    A binary search over the map, and the upper neighbour from the middle on.
    """
    rows = values.view(-1, 256)
    scale = rows.abs().amax(-1).clip(1e-12)
    x = (rows / scale.view(-1, 1)).view(-1)
    codes = torch.where(x >= table[128], 128, 0)
    for step in (64, 32, 16, 8, 4, 2, 1):
        codes += torch.where(x >= table[codes + step], step, 0)
    upper = (codes + 1).clip(max=255)
    half = (table[upper] - table[codes]) * 0.5
    return torch.where(x - table[codes] >= half, upper, codes).to(torch.uint8), scale


def stored_of(name: str, values: Tensor) -> dict[str, Tensor]:
    codec = codec_of("8bit")
    assert codec is not None
    made = codec.stored(name, tuple(values.shape))
    stored = {array: torch.zeros(s, dtype=getattr(torch, d)) for array, (s, d) in made.items()}
    codec.encode(name, values.clone(), stored, slice(0, values.numel()), DRAWS)
    return stored


def patterns(*, signed: bool) -> list[Tensor]:
    """Return values of many sizes, and all that lie next to where a code changes."""
    table = dynamic_map(signed=signed)
    edges = torch.cat([table, (table[:-1] + table[1:]) / 2])
    far = torch.tensor([math.inf, -math.inf])
    near = [edges, *(torch.nextafter(edges, one.expand_as(edges)) for one in far)]
    lowest = -1.0 if signed else 0.0
    close = torch.cat([*near, torch.tensor([1.0, 0.0, 1e-40, 1e-12])]).clamp(lowest, 1.0)
    close = torch.cat([close, torch.ones(-close.numel() % 256)])
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randn(1 << 18, generator=generator)
    many = torch.randn(1 << 18, generator=generator) * torch.exp(4 * sizes)
    zeros = torch.zeros(512)
    return [close, many if signed else many.abs(), zeros, 1e-44 * torch.ones(256)]


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_torchaos(signed: bool) -> None:
    name, table = "exp_avg" if signed else "exp_avg_sq", dynamic_map(signed=signed)
    assert table.tolist() == sorted(table.tolist()) and len(set(table.tolist())) == 256
    for values in patterns(signed=signed):
        codes, scale = torchao_codes(values, table)
        stored = stored_of(name, values)
        assert torch.equal(stored[f"{name}_8bit"], codes)
        assert torch.equal(stored[f"{name}_scale"], scale)
        out = torch.empty_like(values)
        codec = codec_of("8bit")
        assert codec is not None
        codec.decode(name, stored, slice(0, values.numel()), out)
        assert torch.equal(out, (table[codes.long()].view(-1, 256) * scale.view(-1, 1)).view(-1))


def test_the_library_itself_agrees() -> None:
    """Where torchao is installed."""
    utils = pytest.importorskip("torchao.optim.quant_utils", reason="torchao is not installed")
    for signed in (True, False):
        table = torch.tensor(utils.create_dynamic_map(signed))
        assert torch.equal(table, dynamic_map(signed=signed))
        values = patterns(signed=signed)[1]
        scaled, scale = utils.scale_tensor(values.clone(), 256)
        codes, own = torchao_codes(values, table)
        assert torch.equal(utils.quantize_8bit_with_qmap(scaled, table), codes)
        assert torch.equal(scale, own)


@pytest.mark.parametrize("count", [1, 255, 257, 4097, state_codecs._PIECE + 300])
def test_the_last_block_may_be_short(count: int) -> None:
    """And blocks of a whole give what the whole does."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(2))
    padded = torch.cat([values, torch.zeros(-count % 256)])
    whole, more = stored_of("exp_avg", values), stored_of("exp_avg", padded)
    assert torch.equal(whole["exp_avg_8bit"], more["exp_avg_8bit"][:count])
    assert torch.equal(whole["exp_avg_scale"], more["exp_avg_scale"])


def test_what_is_not_finite_stays_so() -> None:
    """It is never made a number; what lies in other blocks is as it was."""
    codec = codec_of("8bit")
    assert codec is not None
    for name in ("exp_avg", "exp_avg_sq"):
        for bad in (math.nan, math.inf, -math.nan):
            values = torch.ones(512)
            values[3] = bad
            stored = stored_of(name, values)
            out = torch.empty(512)
            codec.decode(name, stored, slice(0, 512), out)
            assert not bool(out[:256].isfinite().all()) and bool((out[256:] == 1).all())
    for bits in (0x7FFFFFFF, -1, 0x7FC00000, -4194304):
        nan = torch.tensor([bits] * 64, dtype=torch.int32).view(torch.float32)
        rounded = torch.empty(64, dtype=torch.bfloat16)
        round_stochastically(nan.clone(), rounded, DRAWS, "weight")
        assert bool(rounded.isnan().all())
    inf, largest = torch.tensor([math.inf, -math.inf]), torch.tensor([3.38e38])
    out = torch.empty(2, dtype=torch.bfloat16)
    round_stochastically(inf.clone(), out, DRAWS, "weight")
    assert torch.equal(out.float(), inf)
    round_stochastically(largest.clone(), out[:1], DRAWS, "weight")
    assert float(out[0]) >= 3.36e38


def splitmix(state: int) -> int:
    """Return SplitMix64's number for a state, as its paper writes it."""
    mask = (1 << 64) - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_draws_are_those_of_the_generator() -> None:
    """Keyed by seed, step, parameter, tensor and element; the same from any block on."""
    key = xxhash.xxh3_64_intdigest(b"3 7 layer.weight exp_avg")
    ones = torch.full((64,), 1.0)
    whole = torch.empty(64, dtype=torch.bfloat16)
    round_stochastically(ones + 2.0**-10, whole, DRAWS, "exp_avg")
    for element in range(64):
        number = splitmix((element // 4) * 0x9E3779B97F4A7C15 + key)
        draw = (number >> (16 * (element % 4))) & 0xFFFF
        up = (0x3F802000 & 0xFFFF) + draw >= 1 << 16
        assert float(whole[element]) == (1.0078125 if up else 1.0)
    part = torch.empty(32, dtype=torch.bfloat16)
    round_stochastically(ones[:32] + 2.0**-10, part, DRAWS.at(32), "exp_avg")
    assert torch.equal(part, whole[32:])
    for other in (Draws(4, 7, "layer.weight"), Draws(3, 8, "layer.weight"), Draws(3, 7, "x")):
        round_stochastically(ones[:32] + 2.0**-10, part, other, "exp_avg")
        assert not torch.equal(part, whole[:32])


def test_rounding_is_right_in_the_mean() -> None:
    """Up as often as the rest says, within four standard deviations."""
    count = 1 << 20
    for rest in (0.1, 0.5, 0.9):
        values = torch.full((count,), 1.0 + rest / 128)
        out = torch.empty(count, dtype=torch.bfloat16)
        round_stochastically(values, out, DRAWS, "exp_avg")
        ups = float((out > 1).float().mean())
        assert abs(ups - rest) < 4 * math.sqrt(rest * (1 - rest) / count) + 1 / 65536
        exact = torch.empty(count, dtype=torch.bfloat16)
        round_stochastically(out.float(), exact, DRAWS, "other")
        assert torch.equal(exact, out), "what needs no rounding is not rounded"
