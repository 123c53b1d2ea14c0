"""Large tensors, walked block by block: what is narrow is float32 for a block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from swaptrain.compute.split_master import join, split, storage_order
from swaptrain.compute.state_codecs import WEIGHT, Draws, round_in_pieces

__all__ = ["add_widened", "block_elements", "check_layout", "narrow", "widen"]

# Elements of a block: 2 MiB of float32 stays in a CPU's cache; a GPU wants fewer launches. Blocks
# of a fused step give the bits of the whole only if they start at multiples of 16 elements.
CPU_BLOCK_ELEMENTS = 1 << 19
ACCELERATOR_BLOCK_ELEMENTS = 1 << 24

_LEAST_WIDENED_ELEMENTS = 1 << 18
"""Below, what torch copies stays in a CPU's cache anyway."""


def block_elements(device: torch.device) -> int:
    """Return the number of elements of a block on this device, a multiple of 16."""
    return CPU_BLOCK_ELEMENTS if device.type == "cpu" else ACCELERATOR_BLOCK_ELEMENTS


def same_layout(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether both have the same shape and strides."""
    return parameter.shape == gradient.shape and all(
        size == 1 or a == b
        for size, a, b in zip(parameter.shape, parameter.stride(), gradient.stride(), strict=True)
    )


def check_layout(parameter: Tensor, gradient: Tensor) -> None:
    """Raise ValueError unless the gradient has the parameter's shape and strides.

    torch's fused kernels walk memory and do not look at strides: they would mix up elements.
    """
    if not same_layout(parameter, gradient):
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} and strides {gradient.stride()} for a "
            f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()}: give "
            "it the parameter's layout"
        )


def widen(hi: Tensor, lo: Tensor | None, out: Tensor, *, scratch: Tensor | None = None) -> None:
    """Write the float32 weights of `hi`, which `lo` completes where it is there, into `out`."""
    if lo is None:
        out.copy_(hi)
    elif lo.dtype == torch.float32:
        out.copy_(lo)
    else:
        join(hi, lo, out, scratch=scratch)


def narrow(master: Tensor, hi: Tensor, lo: Tensor | None, draws: Draws) -> None:
    """Write float32 weights, which are overwritten, into their halves, or round them by chance."""
    if lo is not None and lo.dtype == torch.float32:
        lo.copy_(master)
        hi.copy_(master)
        return
    if lo is not None:
        split(master, hi, lo, consume=True)
        return
    round_in_pieces(storage_order(master), storage_order(hi), draws, WEIGHT)


def add_widened(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a float32 sum of the same shape, in place.

    A narrow one is widened block by block, where it lies in memory as the sum does: as a whole it
    would go through memory once more, since torch makes a float32 copy of it first, on a CPU.
    """
    small = total.numel() <= _LEAST_WIDENED_ELEMENTS
    if (
        gradient.dtype == total.dtype
        or total.device.type != "cpu"
        or small
        or gradient.is_sparse
        or not same_layout(total, gradient)
    ):
        total.add_(gradient)
        return
    flat_total, flat_gradient = storage_order(total), storage_order(gradient)  # [n] each
    size = block_elements(total.device)
    for start in range(0, total.numel(), size):
        block = slice(start, start + size)
        flat_total[block].add_(flat_gradient[block].to(total.dtype))
