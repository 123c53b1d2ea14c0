"""In which memory layout the backward of the loss hands each value its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from swaptrain.capture.trace import Trace

__all__ = ["gradient_strides", "is_dense", "overlaps"]


def gradient_strides(trace: Trace) -> Mapping[fx.Node, tuple[int, ...]]:
    """Return the strides of the gradients that come in another layout than their value's.

    After a `transpose` a gradient comes transposed, after a `mean` expanded. Autograd hands it on
    as it is, and a reduction over it adds in the order of its layout: a gradient that crosses a cut
    has to keep its strides, or the last bits differ from the uncut backward's.

    Runs one backward on the fake tensors of the trace: it takes no memory and uses up the trace's
    autograd graph. Where torch cannot run it on fakes, nothing is known and nothing is returned.
    """
    found: dict[fx.Node, tuple[int, ...]] = {}

    def note(node: fx.Node, tensor: torch.Tensor) -> Callable[[torch.Tensor], None]:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())

        def hook(gradient: torch.Tensor) -> None:
            differs = (
                size > 1 and a != b
                for size, a, b in zip(shape, stride, gradient.stride(), strict=True)
            )
            if any(differs):
                found[node] = tuple(gradient.stride())

        return hook

    hooks = []
    leaves: dict[int, torch.Tensor] = {}
    for node, facts in trace.facts.items():
        for tensor in facts.tensors:
            if not trace.gets_gradient(tensor):
                continue
            if tensor.is_leaf:
                leaves[id(tensor)] = tensor
            elif node.op == "call_function" and len(facts.tensors) == 1:
                hooks.append(tensor.register_hook(note(node, tensor)))  # type: ignore[no-untyped-call]
    try:
        with trace.fake_mode:
            torch.autograd.grad(trace.loss, list(leaves.values()), allow_unused=True)
    except (RuntimeError, NotImplementedError):  # an operation without a fake backward
        found.clear()
    finally:
        for handle in hooks:
            handle.remove()
    return found


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill their memory without holes and none lies on another."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements may share memory, other than along expanded dimensions (stride 0)."""
    extent = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1 or step == 0:
            continue
        if step < extent:
            return True
        extent += (size - 1) * step
    return False
