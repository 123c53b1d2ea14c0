"""The split master loses no bit of the float32 weight, and its upper half is the bf16 weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swaptrain.compute import split_master as master_module
from swaptrain.compute.split_master import join, split, storage_order

SPECIAL_BITS = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x807FFFFF, 0x00007FFF, 0x00008000,  # subnormal
    0x3F800000, 0x3F808000, 0x3F807FFF, 0x3F808001, 0xBF818000,  # around a tie
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF,  # the largest
    0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF,  # inf and NaN
]  # fmt: skip


def from_bits(bits: list[int]) -> Tensor:
    """Return float32 with these bits."""
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)


def halves(master: Tensor, *, consume: bool = False) -> tuple[Tensor, Tensor]:
    """Return hi and lo of a master."""
    hi = torch.empty_like(master, dtype=torch.bfloat16)
    lo = torch.empty_like(master, dtype=torch.int16)
    split(master, hi, lo, consume=consume)
    return hi, lo


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bits, so that NaN equals itself and 0.0 differs from -0.0."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL_BITS), max_size=80))
def test_join_undoes_split_for_any_bits(bits: list[int]) -> None:
    """Every float32 comes back bit for bit, NaN payloads included."""
    master = from_bits(bits)
    hi, lo = halves(master.clone(), consume=True)
    joined = torch.full_like(master, 3.0)
    join(hi, lo, joined)
    assert same_bits(joined, master)


def test_every_upper_half_comes_back_and_is_the_formula() -> None:
    """For all 65,536 upper halves and lower halves around the middle the bits are the design's."""
    upper = np.arange(1 << 16, dtype=np.uint64) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = (upper | np.uint64(lower)).astype(np.uint32)
        master = torch.from_numpy(bits.view(np.int32)).view(torch.float32)
        hi, lo = halves(master)
        expected = ((bits.astype(np.uint64) + 0x8000) & 0xFFFFFFFF) >> 16
        assert np.array_equal(hi.view(torch.int16).numpy().view(np.uint16), expected)
        assert np.array_equal(lo.numpy().view(np.uint16), bits & 0xFFFF)
        for scratch in (None, torch.full_like(master, 3.0)):
            joined = torch.empty_like(master)
            join(hi, lo, joined, scratch=scratch)
            assert same_bits(joined, master)


def test_hi_is_the_nearest_bfloat16_but_on_ties() -> None:
    """Off exact ties hi is what torch rounds to."""
    torch.manual_seed(0)
    master = torch.randn(100_000)
    hi, lo = halves(master)
    ties = lo == -0x8000
    assert torch.equal(hi[~ties], master.bfloat16()[~ties])


def test_blocks_are_seamless_and_the_master_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting in blocks equals splitting at once, and leaves the master alone."""
    master = torch.randn(1000)
    before = master.clone()
    hi, lo = halves(master)
    monkeypatch.setattr(master_module, "BLOCK_ELEMENTS", 48)
    block_hi, block_lo = halves(master)
    assert torch.equal(hi, block_hi) and torch.equal(lo, block_lo) and torch.equal(master, before)


def test_halves_may_be_views_of_flat_arrays_in_another_layout() -> None:
    """A transposed parameter's halves lie in its order of memory; lo may be flat and unsigned."""
    master = torch.randn(7, 5).t()
    arrays = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.uint16)
    hi = arrays[0][8:43].as_strided(master.shape, master.stride(), 8)
    lo = arrays[1][8:43]
    split(master, hi, lo)
    joined = torch.empty_like(master)
    assert joined.stride() == master.stride()
    join(hi, lo, joined)
    assert torch.equal(joined, master)
    assert arrays[0][:8].eq(0).all() and arrays[0][43:].eq(0).all()


def test_storage_order_is_a_view_and_refuses_gaps() -> None:
    """Writing the flat view writes the tensor; a tensor with gaps or overlaps is refused."""
    image = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    storage_order(image).copy_(torch.arange(120.0))
    assert image[0, 1, 0, 0] == 1 and image[0, 0, 0, 1] == 3
    for bad in (torch.zeros(4, 6)[:, :3], torch.zeros(3).expand(2, 3)):
        with pytest.raises(ValueError, match="dense"):
            storage_order(bad)
