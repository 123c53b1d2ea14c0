"""Steps with a learning rate of 0: they read and write the whole state and change no weight."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from swaptrain.compute.learning_rate import learning_rate, warmup_steps_of
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.store.format.root import RootRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.steady_position import steady_position

__all__ = ["check_rates", "first_idle_step", "go_on_keys", "steps_done"]


def first_idle_step(config: Config, last: int) -> int | None:
    """Return the first of the steps 1 to `last` whose learning rate is 0; None where none is.

    No step of the warmup counts, though with `from_zero` its first has it; after it no rate is
    larger than the one before, so that all steps from that one on have the rate 0.
    """
    optimizer = config.resolved().optimizer
    schedule = optimizer.schedule
    if schedule.decay_steps is None:
        return None  # no step is trained, or none is known yet
    steps = range(warmup_steps_of(schedule) + 1, last + 1)
    found = bisect_left(
        steps, True, key=lambda step: learning_rate(step, lr=optimizer.lr, schedule=schedule) == 0
    )
    return steps[found] if found < len(steps) else None


def check_rates(config: Config, done: int) -> str | None:
    """Return what a start says of steps with the rate 0, of those that are left; None for nothing.

    While the number of steps is not known yet it is nothing. `done` is the last step that the run
    has completed. Raises ConfigError where every step that is left has the rate 0, but for the last
    one of a schedule that was begun: a run ends with it.
    """
    if config.train.steps is None:
        return None
    last = config.train.steps
    idle = first_idle_step(config, last)
    if idle is None or done >= last:
        return None
    first = max(idle, done + 1)
    named = f"step {last} has" if first == last else f"steps {first} to {last} have"
    schedule = config.resolved().optimizer.schedule
    text = f"{named} the learning rate 0: the {schedule.name} schedule {_end(config)}"
    if first > done + 1 or (done and idle == first == last):
        return f"{text}. {_cure(last, begun=done > 0)} for steps that learn"
    raise ConfigError(
        f"{text}, and no other step is left: they would read and write the whole state and change "
        f"no weight. {_cure(last, begun=done > 0)}"
    )


def steps_done(run_dir: Path, root: RootRecord | None) -> int:
    """Return the last step that a run has completed; 0 where there is no run.

    Beside a process that trains it may be the one before. Raises DamagedStoreError when a record
    does not verify, or the run cannot go on.
    """
    if root is None:
        return 0
    store, position = steady_position(RunPaths(run_dir))
    if position is not None:
        return position.done
    return max(0, min(store.versions.values(), default=0) - 1) if store is not None else 0


def go_on_keys(config: Config, steps: int) -> str:
    """Return what to set for a finished run of `steps` to go on for as many more, and learn."""
    keys = f"train.steps={2 * steps or 100}"
    if first_idle_step(config, steps + 1) is None:
        return keys
    return f"{keys} optimizer.schedule.decay_steps={2 * steps} --accept-change"


def _end(config: Config) -> str:
    schedule = config.resolved().optimizer.schedule
    end, warmup = schedule.decay_steps, warmup_steps_of(schedule)
    return f"ends at step {end}" if warmup < (end or 0) else f"ends with its {warmup} warmup steps"


def _cure(last: int, *, begun: bool) -> str:
    accept = ", with --accept-change," if begun else ""
    return (
        f"Set optimizer.schedule.decay_steps to more than {last}, or min_lr_ratio to more than 0"
        f"{accept}"
    )
