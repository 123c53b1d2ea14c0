"""In which memory layout the backward of the loss hands each value its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from swaptrain.capture.trace import Trace

__all__ = ["relaid_gradients", "same_layout"]


def relaid_gradients(trace: Trace) -> frozenset[fx.Node]:
    """Return the nodes whose result gets its gradient in other strides than its own.

    A gradient that crosses a cut is stored in the layout of its value. Where autograd would have
    handed it on in another one (transposed behind a `transpose`, expanded behind a `mean`), a
    reduction over it adds in another order and the last bits differ, so no cut is made there.
    Runs one backward on the fake tensors of the trace, and so takes no memory; the trace's
    autograd graph is used up. Where torch cannot run it on fakes, nothing is known and nothing is
    returned.
    """
    found: set[fx.Node] = set()

    def note(node: fx.Node, tensor: torch.Tensor) -> Callable[[torch.Tensor], None]:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())

        def hook(gradient: torch.Tensor) -> None:
            if not same_layout(shape, stride, tuple(gradient.stride())):
                found.add(node)

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
                hooks.append(tensor.register_hook(note(node, tensor)))
    try:
        with trace.fake_mode:
            torch.autograd.grad(trace.loss, list(leaves.values()), allow_unused=True)
    except (RuntimeError, NotImplementedError):  # an operation without a fake backward
        found.clear()
    finally:
        for handle in hooks:
            handle.remove()
    return frozenset(found)


def same_layout(
    shape: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]
) -> bool:
    """Whether two strides put the elements of `shape` at the same places."""
    return all(
        a == b for size, a, b in zip(shape, left, right, strict=True) if size > 1
    )
