"""Tensors without memory keep everything about a tensor but its content."""

from __future__ import annotations

import torch

from swaptrain.compute.memoryless import MemorylessTensors
from swaptrain.observe.memory_usage import resident_bytes

MIB = 1 << 20


def test_memoryless_tensors_have_shape_strides_and_dtype_and_share_one_storage() -> None:
    """Whatever the layout: transposed, expanded, empty, without dimensions, growing."""
    memoryless = MemorylessTensors()
    originals = [
        torch.zeros(3, 5, dtype=torch.float64).t(),
        torch.zeros(4, 1).expand(4, 6),
        torch.zeros(0, 7),
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.zeros(7, dtype=torch.int8)[1:],
    ]
    large = torch.empty(64 * MIB, dtype=torch.uint8)  # so that all others fit into its addresses
    kept = memoryless.like(large)
    for tensor in originals:
        like = memoryless.like(tensor)
        assert (like.shape, like.stride(), like.dtype) == (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        assert like.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()


def test_memoryless_tensors_take_no_memory() -> None:
    """Neither one by one nor many at once."""
    memoryless = MemorylessTensors()
    large = torch.empty(256 * MIB, dtype=torch.uint8)  # not touched, so not resident
    before = resident_bytes()
    kept = [memoryless.like(large) for _ in range(100)]
    assert resident_bytes() - before < 8 * MIB
    assert len(kept) == 100
