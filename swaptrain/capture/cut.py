"""Where to cut a graph: legal gaps, what lives across them, and a dynamic program over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CutLimits", "GraphCosts", "choose_cuts"]

_MOST_CANDIDATES = 600


@dataclass(frozen=True)
class GraphCosts:
    """Costs along the N computing nodes of a graph in execution order, from a trace."""

    live_bytes: Sequence[int]
    """[N] bytes of values made at or before node i and read after it."""
    legal: Sequence[bool]
    """[N] whether a cut may follow node i."""
    state_bytes: Sequence[int]
    """[N] bytes on disk of the parameters that are first read by node i."""
    working_bytes: Sequence[int]
    """[N] the same with their gradients: what an update holds in memory."""
    activation_bytes: Sequence[int]
    """[N] bytes that node i allocates for its result."""
    kept: frozenset[int] = frozenset()
    """Nodes after which a cut may lie however many other gaps there are: between ranges."""


@dataclass(frozen=True)
class CutLimits:
    """What a segment should weigh, in bytes."""

    target_bytes: int
    """A good segment's state: small against the budget, large against one I/O request."""
    hard_bytes: int
    """The most that the update of one segment may hold."""
    activation_target_bytes: int
    micro_batches: int


def choose_cuts(costs: GraphCosts, limits: CutLimits) -> list[int]:
    """Return the nodes after which to cut, ascending; none means one segment.

    Minimises by dynamic programming over the legal gaps the sum over segments of
    `(size / target)^2 + 1/2 + traffic of the boundary / traffic of a target's state`, where the
    size is the larger of the state and the activations, each against its target. The square makes
    segments of repeated layers equal; the constant keeps them from becoming too many. A segment
    over the hard limit is taken only where no legal cut divides it.
    """
    n = len(costs.live_bytes)
    gaps = [-1, *_candidates(costs, n), n - 1]
    state, working, activation = (
        _prefix(series)
        for series in (costs.state_bytes, costs.working_bytes, costs.activation_bytes)
    )
    best = [0.0] * len(gaps)
    came_from = [0] * len(gaps)
    for j in range(1, len(gaps)):
        boundary = 0 if j == len(gaps) - 1 else costs.live_bytes[gaps[j]]
        traffic = 2 * limits.micro_batches * boundary / (26 / 12 * limits.target_bytes)
        best[j] = float("inf")
        for i in range(j - 1, -1, -1):
            first, last = gaps[i] + 1, gaps[j] + 1
            size = max(
                (state[last] - state[first]) / limits.target_bytes,
                (activation[last] - activation[first]) / limits.activation_target_bytes,
            )
            over = (working[last] - working[first]) > limits.hard_bytes
            cost = best[i] + size * size + 0.5 + traffic + (1e6 * size if over else 0.0)
            if cost < best[j]:
                best[j], came_from[j] = cost, i
            if size > 8 and i < j - 1:  # only grows from here on
                break
    cuts: list[int] = []
    j = came_from[-1]
    while j > 0:
        cuts.append(gaps[j])
        j = came_from[j]
    return cuts[::-1]


def _candidates(costs: GraphCosts, n: int) -> list[int]:
    """Return the legal gaps, thinned to the least live ones of each neighbourhood when many."""
    gaps = [i for i in range(n - 1) if costs.legal[i]]
    kept = [gap for gap in gaps if gap in costs.kept]
    gaps = [gap for gap in gaps if gap not in costs.kept]
    reach = 4
    while len(gaps) > _MOST_CANDIDATES:
        live = costs.live_bytes
        gaps = [
            gap
            for k, gap in enumerate(gaps)
            if live[gap] <= min(live[other] for other in gaps[max(0, k - reach) : k + reach + 1])
        ]
        reach *= 2
        if reach > 64:
            gaps = gaps[:: -(-len(gaps) // _MOST_CANDIDATES)]
    return sorted([*gaps, *kept])


def _prefix(series: Sequence[int]) -> list[int]:
    total, sums = 0, [0]
    for value in series:
        total += value
        sums.append(total)
    return sums
