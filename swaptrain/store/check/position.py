"""Which files beside the slots a run goes on from, for `verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from swaptrain.store.check.claims import Claim, spilled_claim
from swaptrain.store.format.state_record import SegmentRecord
from swaptrain.store.paths import ZARR_JSON, RunPaths
from swaptrain.store.read.run_position import Handoff, Phase, RunPosition
from swaptrain.units import how_many

__all__ = ["needed_claims", "position_text"]

Again = Callable[[str, int], Claim | None]


def position_text(position: RunPosition) -> str:
    """Return where a run is, in words that follow "is"."""
    if position.decision is None:
        return "at no step: its records do not fit together"
    if position.phase is Phase.BACKWARD:
        return f"inside step {position.step}, after segment {position.decision.segment + 1}"
    if position.pending:
        pending = how_many(len(position.pending), "segment")
        return f"at step {position.done}, its update pending in {pending}"
    return f"at step {position.done}"


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
