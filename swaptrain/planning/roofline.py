"""The least time that a step could have taken, from what it did: for `roofline_fraction`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swaptrain.config.schema import Config
from swaptrain.machine.speeds import Machine, machine
from swaptrain.planning.planner import Plan
from swaptrain.program.cost import floor_s, useful_fraction

__all__ = ["disk_machine", "step_floor"]


def disk_machine(
    config: Config, device: torch.device, note: Callable[[str], None]
) -> Machine | None:
    """Return the speeds of the run's disk and processor; None where there are several disks."""
    paths = config.store.paths or (config.run.dir,)
    if len(paths) != 1 or not paths[0].is_dir():
        return None
    return machine(paths[0], device, [config.model.dtype], note)


def step_floor(
    plan: Plan, found: Machine | None
) -> Callable[[int, int, float, float], float | None]:
    """Return the floor of a step as a function of what was counted while it ran.

    Arguments: bytes read, bytes written, seconds of forward and backward, seconds of the update.
    The floor is that of docs/design.md ("The cost of a step"). Estimated in it: the disk's speed
    at the step's mix, from three mixes measured for a moment; the computing that would be left
    with everything resident, as the seconds that were counted, less what I/O at full speed takes
    from them (sigma), less the recomputation, whose part is taken from the flops of matrix
    products. So the time of the program's own overhead counts as computing. None where the disk
    could not be measured, or there are several.
    """
    if found is None:
        return lambda *_: None
    model, objects = plan.captured.model, plan.builder.objects
    learning = {segment.index for segment in model.segments if objects.learns(segment)}
    useful = useful_fraction(model, plan.builder.saves, learning)

    def floor(read_bytes: int, write_bytes: int, compute_s: float, update_s: float) -> float:
        io_s = found.disk.seconds(read_bytes, write_bytes)
        together_s = compute_s + update_s
        alone = 1 - min(1.0, found.sigma * io_s / together_s) if together_s else 0.0
        return floor_s(io_s, alone * (useful * compute_s + update_s), found.sigma)

    return floor
