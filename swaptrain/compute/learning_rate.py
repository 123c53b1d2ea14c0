"""The learning rate of every step, as a pure function of the step's number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from swaptrain.errors import ConfigError

__all__ = ["Schedule", "ScheduleFields", "learning_rate", "warmup_steps_of"]


class ScheduleFields(Protocol):
    """What a schedule consists of; the config's `optimizer.schedule` and `Schedule` both fit."""

    @property
    def name(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def warmup_ratio(self) -> float | None: ...
    @property
    def decay_steps(self) -> int | None: ...
    @property
    def min_lr_ratio(self) -> float: ...
    @property
    def decay_fraction(self) -> float: ...
    @property
    def from_zero(self) -> bool: ...


@dataclass(frozen=True)
class Schedule:
    """A schedule without a config, for use from Python."""

    name: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr_ratio: float = 0.0
    decay_fraction: float = 0.2
    warmup_ratio: float | None = None
    from_zero: bool = False


def learning_rate(step: int, *, lr: float, schedule: ScheduleFields) -> float:
    """Return the learning rate of `step`, which counts from 1, in float64.

    With D = decay_steps, W = warmup_steps (or warmup_ratio D, rounded up) and f = min_lr_ratio,
    the rate is `lr * step / W` while step <= W, and then `lr` times a factor of
    t = (step - W) / max(1, D - W), clipped to [0, 1]: constant 1; linear 1 - (1 - f) t; cosine
    f + (1 - f) (1 + cos(pi t)) / 2; wsd (warmup, stable, decay) 1 until the last `decay_fraction`
    of D, then linear to f at step D. With `from_zero` all of that is said of step - 1, to the
    bits of transformers' schedules.

    Raises:
        ConfigError: `decay_steps` is needed and missing, or the name is unknown.
    """
    warmup_steps = warmup_steps_of(schedule)
    if schedule.from_zero:
        step -= 1
    if step <= warmup_steps and warmup_steps:
        return lr * (step / warmup_steps) if schedule.from_zero else lr * step / warmup_steps
    if schedule.name == "constant":
        return lr
    if schedule.decay_steps is None:
        raise ConfigError(
            f"optimizer.schedule.decay_steps: the {schedule.name} schedule needs a number of "
            "steps; set it, or train.steps, from which it is taken"
        )
    return lr * decay_factor(step, schedule, schedule.decay_steps)


def warmup_steps_of(schedule: ScheduleFields) -> int:
    """Return the steps of a schedule's warmup; raises ConfigError where it is a part of nothing."""
    if schedule.warmup_ratio is None:
        return schedule.warmup_steps
    if schedule.decay_steps is None:
        raise ConfigError(
            "optimizer.schedule.warmup_ratio is a part of decay_steps: set it, or train.steps, "
            "from which it is taken"
        )
    return math.ceil(Fraction(str(schedule.warmup_ratio)) * schedule.decay_steps)


def decay_factor(step: int, schedule: ScheduleFields, decay_steps: int) -> float:
    """Return the factor of the learning rate after the warmup, in [min_lr_ratio, 1]."""
    warmup_steps, floor = warmup_steps_of(schedule), schedule.min_lr_ratio
    t = clip((step - warmup_steps) / max(1, decay_steps - warmup_steps))
    if schedule.name == "linear" and schedule.from_zero:
        left = clip((decay_steps - step) / max(1, decay_steps - warmup_steps))
        return floor + (1.0 - floor) * left
    if schedule.name == "linear":
        return 1.0 - (1.0 - floor) * t
    if schedule.name == "cosine":
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * t)) / 2.0
    if schedule.name == "wsd":
        # The stable part never ends before the warmup does.
        decay_start = max(warmup_steps, decay_steps - schedule.decay_fraction * decay_steps)
        u = clip((step - decay_start) / max(1.0, decay_steps - decay_start))
        return 1.0 - (1.0 - floor) * u
    raise ConfigError(
        f"optimizer.schedule.name: {schedule.name!r} is not a schedule; "
        "use constant, linear, cosine or wsd"
    )


def clip(t: float) -> float:
    """Return `t` limited to [0, 1]."""
    return min(1.0, max(0.0, t))
