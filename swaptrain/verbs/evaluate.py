"""`eval`: what held-out data says of one step of a run, segment by segment as in training."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from swaptrain.chat.files import SUFFIXES
from swaptrain.config.data import EvalConfig
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError, RunError, StoppedBySignal
from swaptrain.observe.eval_result import EvalResult
from swaptrain.observe.progress import Progress
from swaptrain.planning.prepare import Prepared, recorded_config
from swaptrain.planning.ram_budget import check_memory
from swaptrain.run.open_run import Start, open_run
from swaptrain.run.os_failures import named_failures
from swaptrain.run.run_directory import RunDirectory
from swaptrain.run.signals import StopRequest
from swaptrain.store.access.containment import check_contained
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.step_in_links import step_in_links
from swaptrain.units import format_duration, how_many
from swaptrain.verbs.stored_step import StoredStep, live_store, with_step

__all__ = ["Evaluated", "evaluate_run", "source_of", "with_held_out"]

_SOURCES = {
    "chat": SUFFIXES,
    "text": (".txt", ".md", ".py"),
    "tokens": (".bin", ".npy"),
}
"""Which key of the eval section reads a file, by the end of its name."""


@dataclass(frozen=True)
class Evaluated:
    """What the held-out data says of a step."""

    step: int
    found: EvalResult
    items: int
    seconds: float

    def line(self) -> str:
        """Return it for a person."""
        last = how_many(self.items, "item"), format_duration(self.seconds)
        return " | ".join([f"step {self.step}", self.found.text(), *last])


def with_held_out(config: Config, files: Sequence[str]) -> Config:
    """Return the config with `files` (globs too) as its held-out data; all of them are read.

    Raises ConfigError for names of which it is not clear how they are read.
    """
    found = {"every": 1, "batches": "all", source_of(files, "--data"): list(files)}
    for name in files:
        if not glob.has_magic(name) and not Path(name).is_file():
            raise ConfigError(f"--data {name}: there is no such file")
    return config.model_copy(update={"eval": EvalConfig.model_validate(found)})


def source_of(files: Sequence[str], argument: str) -> str:
    """Return the key that reads files of such names: `chat`, `text` or `tokens`.

    Raises ConfigError, which names the `argument`, where that is not clear.
    """
    keys = {
        next((key for key, ends in _SOURCES.items() if name.lower().endswith(ends)), None)
        for name in files
    }
    (key, *others) = keys
    if key is None or others:
        kinds = "; ".join(f"{key} of {', '.join(ends)}" for key, ends in _SOURCES.items())
        raise ConfigError(
            f"{argument} {' '.join(files)}: give files of one kind that their names tell ({kinds}),"
            " or a key, such as eval.text=[FILE]"
        )
    return key


def evaluate_run(
    config: Config,
    from_step: int | None = None,
    note: Callable[[str], None] = print,
    progress: Callable[[], Progress] = Progress,
) -> Evaluated:
    """Return what the data of the eval section says of one step of the run in `run.dir`.

    The loss is the one that training writes to metrics.jsonl after the same step, bit for bit.
    With `from_step`: of the snapshot of that step. Of a run that trains: of the end of the step in
    progress, where the trainer waits. Of any other: of its last commit. Nothing of the run changes:
    its step is laid out as a run directory of links, RUN/evaluation, which is deleted afterwards.
    Raises ConfigError where there is no run, no snapshot or no data; RunError where the run was
    stopped inside a step.
    """
    if config.eval is None:
        raise ConfigError(
            "there is no held-out data: give --data FILE, an eval section of the config, or keys "
            "such as eval.every=1 eval.text=[more/*.txt] beside --config FILE"
        )
    run = config.run.dir
    if RunPaths(run).run_dir.exists():
        check_contained(run)
    live_store(run)

    def use(stored: StoredStep) -> Evaluated:
        with step_in_links(stored.store, stored.step, note) as there:
            return _evaluated(config, there, stored.step, note, progress())

    with named_failures(config):
        return with_step(run, from_step, use, note, "evaluate")


def _evaluated(
    config: Config, there: Path, step: int, note: Callable[[str], None], progress: Progress
) -> Evaluated:
    recorded = recorded_config(config.run.dir)
    if recorded is not None:
        written = _moved(recorded, there, recorded.train.last_step).resolved_yaml()
        write_aside(RunPaths(there).config, written.encode())
    directory = RunDirectory(_moved(config, there, step), fresh=False, accept_change=True)
    with (
        progress,
        StopRequest() as stop,
        ExitStack() as resources,
    ):
        root = directory.open(progress.note)
        prepared = Prepared(directory.config, root, note)
        check_memory(config.memory.host, prepared.plan, note)
        start = Start(prepared.config, prepared, root, False, None, None, evaluates=True)
        training = open_run(start, resources, progress, stop, lambda *_: None)
        begun = time.perf_counter()
        try:
            found = training.evaluate()
        except StoppedBySignal as stop_error:
            stop_error.args = ("stopped; nothing of an evaluation is kept",)
            raise
        seconds = time.perf_counter() - begun
    if training.evaluation is None:
        raise RunError("the data of the evaluation has gone meanwhile")
    return Evaluated(step, found, training.evaluation.weights.items, seconds)


def _moved(config: Config, there: Path, steps: int) -> Config:
    """Return the config of a run directory that ends after `steps` and has nothing beside it."""
    # What a snapshot holds is written again once it is dropped: each read is compared.
    store = {"paths": None, "keep": None, "verify": "always"}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": there, "trace": 0}),
            "store": config.store.model_copy(update=store),
            "train": config.train.model_copy(
                update={"steps": steps, "epochs": None, "report_to": ()}
            ),
        }
    )
