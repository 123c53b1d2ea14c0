"""Tensors over slabs: views by layout, and copies that keep strides."""

from __future__ import annotations

import torch
from torch import Tensor

from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.format.layout import ArrayEntry, ArrayLayout
from swaptrain.store.format.object_layouts import Layouts

__all__ = ["clear_padding", "copy_into", "object_view", "once", "view", "views"]


def views(layout: ArrayLayout, slab: Slab) -> dict[str, Tensor]:
    """Return the tensors of an array by name, as views of its slab, each in its own shape.

    In a part of an array what lies there of a tensor is [n].
    """
    flat = slab.tensor(getattr(torch, layout.dtype), layout.length)  # [n], padding included
    return {entry.tensor.name: _strided(flat, entry) for entry in layout.entries}


def clear_padding(layout: ArrayLayout, slab: Slab) -> None:
    """Set what lies between and after the tensors to zero: fresh slabs hold anything."""
    flat, end = slab.tensor(getattr(torch, layout.dtype), layout.length), 0  # flat: [n]
    for entry in layout.entries:
        flat[end : entry.offset].zero_()
        end = entry.offset + entry.tensor.extent
    flat[end:].zero_()


def view(layout: ArrayLayout, slab: Slab) -> Tensor:
    """Return the only tensor of an array."""
    flat = slab.tensor(getattr(torch, layout.dtype), layout.length)  # [n]
    return _strided(flat, layout.entries[0])


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a value into its slab, also where expanded dimensions share memory (stride 0).

    Both have the value's shape.
    """
    with torch.no_grad():
        target, source = once(target, source)
        target.copy_(source)


def object_view(layouts: Layouts, key: ObjectKey, slab: Slab) -> Tensor:
    """Return an object that is one tensor as that, in its slab.

    What autograd saves is bytes, uint8, [n]: it knows itself what lies where.
    """
    if key.kind is Kind.SAVED:
        return slab.tensor(torch.uint8, slab.nbytes)
    return view(layouts.array(key), slab)


def once(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return both without what `target` repeats: of an expanded dimension (stride 0) one index."""
    for dimension, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dimension] > 1:
            target = target.narrow(dimension, 0, 1)
            source = source.narrow(dimension, 0, 1)
    return target, source


def _strided(flat: Tensor, entry: ArrayEntry) -> Tensor:
    return flat.as_strided(entry.tensor.shape, entry.tensor.stride, entry.offset)
