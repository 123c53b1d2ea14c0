"""What bounds a step, and the one change that would help most, both by rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from swaptrain.memory.limits import available_bytes
from swaptrain.planning.step_cost import price
from swaptrain.units import format_duration, format_size
from swaptrain.verbs.plans.planned import Planned

__all__ = ["bound", "bounding"]

_MOST_INSTRUCTIONS = 4000
"""Of a step that is rehearsed twice more."""
_NEAR = 1.15
"""A step that takes so much longer than the disk and the processor each need waits for room."""
_WORTH = 0.95
"""Of the time per token: what takes more of it is no help."""


@dataclass(frozen=True)
class _Change:
    words: str
    share: float
    """Of the present time per token."""
    costs: str


def bounding(io_s: float, work_s: float, step_s: float) -> str:
    """Return what bounds a step: `disk`, `processor`, or `memory` where neither works all along."""
    if step_s > _NEAR * max(io_s, work_s):
        return "memory"
    return "disk" if io_s > work_s else "processor"


def bound(found: Planned) -> str | None:
    """Say in a sentence what bounds a step and what would help most; None without seconds."""
    step_s, io_s, work_s = found.price.step_s, found.io_s, found.work_s
    if step_s is None or io_s is None:
        return None
    what = bounding(io_s, work_s, step_s)
    said = {
        "disk": f"the disk, which works for {format_duration(io_s)} of {format_duration(step_s)}",
        "processor": f"computing, {format_duration(work_s)} of {format_duration(step_s)}",
        "memory": f"memory: with more room the disk ({format_duration(io_s)}) and computing "
        f"({format_duration(work_s)}) would wait less for each other",
    }[what]
    if len(found.made.step) > _MOST_INSTRUCTIONS:
        return f"{said}; --suggest tries changes"
    best = min(_changes(found), key=lambda change: change.share, default=None)
    if best is None or best.share > _WORTH:
        helps = "only a faster processor, or adapters (lora), would help"
        return f"{said}; {helps if what == 'processor' else '--suggest tries changes'}"
    return f"{said}; {best.words} would take {best.share:.2f} of the time per token ({best.costs})"


def _changes(found: Planned) -> Iterator[_Change]:
    """Yield what can be rehearsed with what was measured: more memory, more micro-batches."""
    config, made, step_s = found.config, found.made, found.price.step_s
    assert step_s is not None
    host_bytes, count = config.memory.host, config.data.micro_batches
    more = price(replace(made, pool_bytes=made.pool_bytes + host_bytes), config, found.machine)
    free_bytes = available_bytes()
    if more.step_s is not None:
        here = free_bytes is None or made.base_bytes + 2 * host_bytes <= free_bytes
        costs = "the same bits" + ("" if here else ", and more than this machine has free")
        size = format_size(2 * host_bytes)
        yield _Change(f"memory.host of {size}", more.step_s / step_s, costs)
    twice = replace(made, builder=replace(made.builder, micro_batches=2 * count))
    if found.root is None and len(twice.step) <= 2 * _MOST_INSTRUCTIONS:
        longer = price(twice, config, found.machine)
        if longer.step_s is not None:
            costs = f"steps of about {format_duration(longer.step_s)}, of twice the batch"
            words = f"data.micro_batches of {2 * count}"
            yield _Change(words, longer.step_s / 2 / step_s, costs)
