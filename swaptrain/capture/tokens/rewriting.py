"""Puts a call in the place of a region, in a segment's graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from swaptrain.capture.tokens.ranges import TokenRanges
from swaptrain.capture.tokens.regions import Region

__all__ = ["has_ranges", "replace_regions"]


def replace_regions(
    graph: fx.Graph,
    regions: Iterable[Region],
    copies: Mapping[fx.Node, fx.Node],
    tokens: int,
) -> None:
    """Let a segment's graph compute regions over ranges of `tokens`, in place.

    `copies` are the segment's nodes by those of the graph that the regions were found in.
    """
    now = dict(copies)
    for region in regions:  # in the order of the graph: one may read what another makes
        (out,) = region.rows.tensors(region.out)
        call = TokenRanges(
            region.body(),
            tokens,
            count=region.rows.count,
            row_inputs=len(region.row_inputs),
            shape=out.shape,
        )
        last = now[region.out]
        inputs = tuple(now[node] for node in (*region.row_inputs, *region.whole_inputs))
        with graph.inserting_before(last):
            made = graph.call_function(call, inputs)
        made.meta.update(last.meta)
        last.replace_all_uses_with(made)
        for node in reversed(region.nodes):
            graph.erase_node(now[node])
        now[region.out] = made


def has_ranges(codes: Iterable[fx.GraphModule]) -> bool:
    """Whether one of the segments' codes computes anything over ranges of tokens."""
    nodes = (node for code in codes for node in code.graph.nodes)
    return any(getattr(node.target, "is_over_tokens", False) for node in nodes)
