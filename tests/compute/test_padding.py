"""What lies between and behind the tensors of an array."""

from __future__ import annotations

import torch

from swaptrain.compute.object_tensors import clear_padding, views
from swaptrain.memory.pages import PagePool
from swaptrain.program.tensors import TensorSpec
from swaptrain.store.format.layout import lay_out


def test_only_the_padding_is_cleared() -> None:
    """A slab that held something else before keeps none of it but under the tensors."""
    tensors = [TensorSpec(f"t{n}", (n,), (1,), "bfloat16") for n in (5, 64, 0, 33)]
    layout = lay_out("gradient", "bfloat16", tensors, chunk_limit_bytes=4096)
    pool = PagePool(layout.nbytes)
    slab = pool.take(layout.nbytes)
    slab.memory[:] = b"\xff" * layout.nbytes
    clear_padding(layout, slab)
    assert sum(byte == 0xFF for byte in slab.memory) == 2 * (5 + 64 + 33)
    for tensor in views(layout, slab).values():
        assert (tensor.view(torch.uint16).to(torch.int32) == 0xFFFF).all()
    pool.give(slab)
