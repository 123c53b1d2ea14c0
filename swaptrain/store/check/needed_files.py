"""The files beside the slots from which a run goes on, as claims that `verify` checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from swaptrain.store.check.claims import Claim, spilled_claim
from swaptrain.store.format.state_record import SegmentRecord
from swaptrain.store.paths import ZARR_JSON, RunPaths
from swaptrain.store.read.run_position import Handoff, RunPosition

__all__ = ["needed_claims"]

Again = Callable[[str, int], Claim | None]


def needed_claims(paths: RunPaths, position: RunPosition, again: Again) -> Iterator[Claim]:
    """Yield the hand-off and the gradients that the step goes on from.

    `again` finds one of them once more, by its title and segment.
    """
    if position.decision is None:
        return
    if position.handoff is not None:
        yield _handoff_claim(paths, position, position.handoff, again)
    for k in sorted(position.gradients_used):
        yield _gradient_claim(paths, k, position.gradients[k], again)


def _handoff_claim(paths: RunPaths, position: RunPosition, handoff: Handoff, again: Again) -> Claim:
    """Return the gradients that the commit of a segment handed on."""
    k = handoff.segment
    deferred = position.found.gradients is not None
    path = paths.gradient_record(k) if deferred else paths.live_link(k) / ZARR_JSON
    record = (position.gradients if deferred else position.live)[k]
    arrays = [
        (paths.spilled("gradients", row.key.label), row.row, row.checksums) for row in handoff.rows
    ]
    return spilled_claim("hand-off", k, path, record, arrays, lambda: again("hand-off", k))


def _gradient_claim(paths: RunPaths, k: int, record: SegmentRecord, again: Again) -> Claim:
    """Return the finished gradient of a segment, where it was spilled to, and its buffers."""
    arrays = [
        (paths.spilled("accumulators" if name == "gradient" else "finished", k) / name, None, sums)
        for name, sums in record.checksums.items()
    ]
    path = paths.gradient_record(k)
    return spilled_claim("gradient", k, path, record, arrays, lambda: again("gradient", k))
