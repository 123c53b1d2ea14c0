"""Puts the weights of a step into a segment's graph, as the loss's terms are copied into it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from swaptrain.capture.losses.operations import arguments
from swaptrain.capture.losses.terms import LossTerms
from swaptrain.capture.losses.weighting import divided, over_all, part, reduction, share

__all__ = ["weigh"]


def weigh(
    node: fx.Node,
    copies: Mapping[fx.Node, fx.Node],
    terms: LossTerms,
    used: list[int],
) -> fx.Node:
    """Return what stands for the copy of `node` in a segment's graph from now on.

    `copies` holds the copy of the node and those of its arguments. `used` are the numbers of the
    terms that the segment has so far: code that several segments share knows them by position.
    Outside of a counted step the graph computes, operation by operation, what it did.
    """
    copy = copies[node]
    graph = copy.graph
    if node in terms.entropies:
        index = _index(used, terms.entropies[node])
        with graph.inserting_before(copy):
            chosen = graph.call_function(reduction, (index,))
        given = arguments(copy) | {"reduction": chosen}
        copy.args, copy.kwargs = tuple(given.values()), {}
        return graph.call_function(divided, (copy, index))
    if node in terms.quotients:
        index = _index(used, terms.quotients[node])
        with graph.inserting_before(copy):
            below = graph.call_function(over_all, (copy.args[1], index, terms.elements[node]))
        copy.update_arg(1, below)
        return graph.call_function(part, (copy, index))
    if node in terms.shared:
        for child in terms.shared[node]:
            with graph.inserting_before(copy):
                its_share = graph.call_function(share, (copies[child],))
            copy.replace_input_with(copies[child], its_share)
        if len(copy.args) > 1 and isinstance(number := copy.args[1], int | float) and number:
            with graph.inserting_before(copy):
                copy.update_arg(1, graph.call_function(share, (number,)))
    return copy


def _index(used: list[int], term: int) -> int:
    used.append(term)
    return len(used) - 1
