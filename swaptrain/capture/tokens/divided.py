"""What of a captured graph is computed over ranges of tokens: found before it is cut.

A region lies in one segment, whatever the budgets: so the bits depend on the number of tokens in a
range and on nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from swaptrain.capture.head.loss_by_rows import heads_of_losses
from swaptrain.capture.tokens.regions import Region, find_regions
from swaptrain.capture.trace import Trace

__all__ = ["DividedTokens", "divide_tokens"]


@dataclass(frozen=True)
class DividedTokens:
    """The regions and heads of a graph that are computed over ranges of `tokens`."""

    tokens: int
    regions: tuple[Region, ...]
    heads: tuple[tuple[fx.Node, ...], ...]
    """The operations of each, from the linear layer to the cross entropy."""
    inside: Mapping[fx.Node, int] = field(default_factory=dict)
    """By operation whose result never exists whole: the bytes that exist of it at once."""

    def spans(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield the first and last operation of each, between which no cut may lie."""
        for region in self.regions:
            yield region.nodes[0], region.out
        for head in self.heads:
            yield head[0], head[-1]

    def at_once_bytes(self, node: fx.Node, trace: Trace) -> int:
        """Return the bytes that exist at once of what an operation makes."""
        known = self.inside.get(node)
        return trace.made_bytes(node) if known is None else known

    def saved_bytes(self, nodes: Collection[fx.Node], trace: Trace) -> int:
        """Return by how much less a segment of these operations holds than all that it computes.

        Sums of the weights' gradients over the ranges are held instead.
        """
        own = set(nodes)
        left_out = sum(trace.made_bytes(n) - self.inside[n] for n in own & self.inside.keys())
        weights: dict[fx.Node, None] = {}
        for region in self.regions:
            if region.out in own:
                weights.update(dict.fromkeys(region.whole_inputs))
        for head in self.heads:
            if head[-1] in own:
                weights.update(dict.fromkeys(head[0].all_input_nodes[1:]))
        return left_out - sum(_sum_bytes(node, trace) for node in weights)


def divide_tokens(captured: fx.GraphModule, trace: Trace, tokens: int) -> DividedTokens:
    """Find what of a traced graph is computed over ranges of `tokens`."""
    written = frozenset().union(*(facts.written for facts in trace.facts.values()))

    def is_safe(head: tuple[fx.Node, ...]) -> bool:
        """Whether nobody writes to what it reads, which the backward reads again."""
        return not any(trace.facts[node].touched & written for node in head)

    heads = tuple(filter(is_safe, heads_of_losses(captured.graph, tokens)))
    taken = {node for head in heads for node in head}
    regions = tuple(find_regions(captured.graph, trace, tokens, taken=taken))
    inside: dict[fx.Node, int] = {}
    for region in regions:
        for node in region.nodes[:-1]:
            inside[node] = _of_range(trace.made_bytes(node), tokens, region.rows.count)
    for head in heads:
        for node in head[:-1]:
            count = prod(trace.facts[head[0]].tensors[0].shape[:-1])
            inside[node] = _of_range(trace.made_bytes(node), tokens, count)
    return DividedTokens(tokens, regions, heads, inside)


def _of_range(nbytes: int, tokens: int, count: int) -> int:
    """Return the bytes of a range of rows, and of its gradient, as far as the whole has so many."""
    return min(nbytes, 2 * nbytes * tokens // count)


def _sum_bytes(node: fx.Node, trace: Trace) -> int:
    """Return what the sum of a weight's gradients takes."""
    (tensor,) = trace.facts[node].tensors
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.numel() * wide.itemsize if tensor.requires_grad else 0
