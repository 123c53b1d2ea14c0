"""Which parameters of a graph can be divided: those that only such readers read as go by ranges."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from swaptrain.capture.ranges.divided_read import DividedRead
from swaptrain.capture.ranges.expert_products import products_of
from swaptrain.capture.ranges.lookups import lookups_of
from swaptrain.capture.segments import Binding
from swaptrain.capture.trace import Trace

__all__ = ["divisible_reads"]


def divisible_reads(
    trace: Trace, origins: Mapping[fx.Node, Binding]
) -> Mapping[str, tuple[DividedRead, ...]]:
    """Return what reads each parameter that can be divided, by its name.

    Nothing else reads it: products of rows in the order of their experts, or lookups. Its rows lie
    one after the other, without holes.
    """
    found: dict[str, list[DividedRead]] = {}
    others: set[str] = set()
    for node, binding in origins.items():
        if binding.kind != "parameter":
            continue
        reads = found.setdefault(binding.name, [])
        for user in node.users:
            own = products_of(node, user, trace) or lookups_of(node, user, trace)
            if own is None:
                others.add(binding.name)
            else:
                reads += own
    return {name: tuple(each) for name, each in found.items() if each and name not in others}
