"""The node that a model's own check leaves in a captured graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from swaptrain.errors import RunError

__all__ = [
    "CHECK",
    "KNOWN",
    "check_computed",
    "is_check",
    "is_scalar",
    "refuse_unknown_sizes",
    "unchecked",
]

_Library: Any = torch.library.Library  # which torch does not type
_library = _Library("swaptrain", "DEF")
_library.define("check(Tensor condition, str message) -> ()")
_library.define("known(Tensor value, str where) -> ()")
_library.impl("known", lambda value, where: None, "CompositeExplicitAutograd")
_library.impl("check", lambda condition, message: None, "CompositeExplicitAutograd")

CHECK = torch.ops.swaptrain.check.default
"""Recorded while exporting: all elements of `condition` have to be true."""

KNOWN = torch.ops.swaptrain.known.default
"""Recorded while exporting: Python code was told the value of a tensor, in the line `where`."""

_ASSERTIONS: frozenset[object] = frozenset(
    {
        CHECK,
        KNOWN,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    }
)
_off = 0


def is_check(node: fx.Node) -> bool:
    """Whether the node only asserts something."""
    return node.op == "call_function" and (
        node.target in _ASSERTIONS or node.target is check_computed
    )


def is_scalar(node: fx.Node) -> bool:
    """Whether the node's result is a number that was not known while exporting."""
    number = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return node.op == "call_function" and isinstance(node.meta.get("val"), number)


def refuse_unknown_sizes(graph: fx.Graph) -> None:
    """Raise ValueError where a number that was not known is read by more than assertions."""
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = [size for t in pytree.tree_leaves(value) for size in getattr(t, "shape", ())]
        number = any(is_scalar(argument) for argument in node.all_input_nodes)
        read = number and not is_check(node) and not is_scalar(node) and node.op != "output"
        if read or any(isinstance(size, torch.SymInt) for size in sizes):
            raise ValueError(
                f"data-dependent: the size or an argument of {node.name} ({node.target}) depends "
                f"on values: {node.meta.get('stack_trace', '').strip()}"
            )


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let checks on computed values pass: a dry run computes with no real weights."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


class _CheckComputed:
    """Raises RunError where a condition does not hold; stays in the code of a segment."""

    __name__, __qualname__ = "check_computed", "check_computed"

    def __call__(self, condition: torch.Tensor | bool, message: str) -> None:
        if _off:
            return
        holds = bool(condition.all()) if isinstance(condition, torch.Tensor) else bool(condition)
        if not holds:
            raise RunError(f"a check that the model makes in its forward fails: {message}")

    def __repr__(self) -> str:  # a part of the graph's fingerprint
        return "swaptrain.check_computed"


check_computed = _CheckComputed()
