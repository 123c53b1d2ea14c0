"""`eval`: the held-out loss of a run's last step, segment by segment as in training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError
from swaptrain.observe.eval_result import EvalResult
from swaptrain.observe.progress import Progress
from swaptrain.plan.prepare import Prepared
from swaptrain.plan.ram_budget import check_memory
from swaptrain.run.finish import finish
from swaptrain.run.open_run import Start, open_run
from swaptrain.run.os_failures import named_failures
from swaptrain.run.run_directory import RunDirectory
from swaptrain.run.signals import StopRequest
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.steady_position import steady_position
from swaptrain.units import format_duration
from swaptrain.verbs.stored_step import refusal

__all__ = ["Evaluated", "evaluate_run"]


@dataclass(frozen=True)
class Evaluated:
    """What the held-out data says of a step."""

    step: int
    found: EvalResult
    items: int
    seconds: float

    def line(self) -> str:
        """Return it for a person."""
        last = f"{self.items:,} items", format_duration(self.seconds)
        return " | ".join([f"step {self.step}", self.found.text(), *last])


def evaluate_run(config: Config, note: Callable[[str], None] = print) -> Evaluated:
    """Return the loss of the last step of the run in `run.dir` on the data of the eval section.

    It is the one that training writes to metrics.jsonl behind the same step, bit for bit. Nothing
    of the run changes, its recorded config included. Raises ConfigError where there is no run or no
    data; RunError where the run was stopped inside a step, or trains.
    """
    if config.eval is None:
        raise ConfigError(
            "there is no held-out data: give the config an eval section, or keys such as "
            "eval.every=1 eval.text=[more/*.txt] beside --config FILE"
        )
    paths = RunPaths(config.run.dir)
    store, position = steady_position(paths) if paths.store.exists() else (None, None)
    if store is None:
        raise ConfigError(f"{config.run.dir} has no commit yet: train it first")
    if position is not None and not (position.is_whole and not position.pending):
        position.decided()
        raise RunError(refusal(config.run.dir, position, "evaluate"))
    done = position.done if position is not None else 0
    train = config.train.model_copy(update={"steps": done, "epochs": None})
    directory = RunDirectory(
        config.model_copy(update={"train": train}), fresh=False, accept_change=True
    )
    with (
        named_failures(config),
        Progress(host_budget_bytes=config.memory.host) as progress,
        StopRequest() as stop,
        ExitStack() as held,
    ):
        held.enter_context(directory.locked(progress.note))
        root = directory.open(progress.note)
        recorded = directory.recorded
        finished = not paths.spill.exists() or (
            recorded is not None and done >= recorded.train.last_step  # an `eval` was killed
        )
        prepared = Prepared(directory.config, root, note)
        check_memory(config.memory.host, prepared.plan, note)
        start = Start(prepared.config, prepared, root, False, None, None, records=False)
        training = open_run(start, held, progress, stop, lambda *_: None)
        begun = time.perf_counter()
        found = training.evaluate()
        seconds = time.perf_counter() - begun
        if finished:
            finish(training, stop)
    assert training.evaluation is not None
    return Evaluated(done, found, training.evaluation.weights.items, seconds)
