"""The command that trains: starts a run, or goes on with it where it stopped."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from swaptrain.config.schema import Config
from swaptrain.errors import BudgetError, ConfigError, DamagedStoreError, NotFiniteError
from swaptrain.machine.fingerprint import note_changes, this_machine
from swaptrain.observe.progress import Progress
from swaptrain.observe.reports import import_reporters, open_reports
from swaptrain.planning.check_capture.check import check_capture
from swaptrain.planning.other_ranks import NOBODY
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.ram_budget import check_memory
from swaptrain.program.instructions import Instruction
from swaptrain.ranks.agreement import in_all
from swaptrain.ranks.launch import launched
from swaptrain.ranks.limits import check_alone
from swaptrain.run.finish import finish, finished_step, finished_text
from swaptrain.run.go_back import find_snapshot
from swaptrain.run.idle_rates import check_rates, steps_done
from swaptrain.run.open_run import Start, open_run
from swaptrain.run.os_failures import named_failures
from swaptrain.run.run_directory import RunDirectory
from swaptrain.run.signals import StopRequest
from swaptrain.store.format.root import RootRecord
from swaptrain.store.slots.snapshots import list_snapshots
from swaptrain.verbs.listener import Listener
from swaptrain.verbs.member import Member
from swaptrain.verbs.samples import Samples

__all__ = ["train"]


def train(
    config: Config,
    *,
    fresh: bool = False,
    accept_change: bool = False,
    from_step: int | None = None,
    observe: Callable[[int, Instruction], None] = lambda *_: None,
    listener: Listener | None = None,
    progress: Progress | None = None,
    member: Member | None = None,
) -> None:
    """Train as `config` says, from the beginning or from where its run directory stopped.

    With `from_step` the run goes back to the snapshot of that step first. Where that would help
    after an error, a note of the error says so.

    `observe` is called after each instruction with the step that it belongs to (of an update that
    waits for the global norm, the step of its gradients) and the instruction, when what earlier
    segments left to write is on the disk: with the unit `segment` a killed run does nothing again
    of what was observed but instructions of `store.commit.lag` segments. `listener` hears of steps,
    and `progress` shows them; null: on the standard output. `member` is this process where torchrun
    has started several, which then train together; `config` is the same in all of them.

    Raises ConfigError before anything is written when something is wrong with the input, RunError
    when the run fails and can be resumed, DamagedStoreError, StoppedBySignal.
    """
    try:
        _train(
            config,
            fresh=fresh,
            accept_change=accept_change,
            from_step=from_step,
            observe=observe,
            listener=listener,
            progress=progress
            or Progress(host_budget_bytes=config.memory.host, log_every=config.run.log_every),
            member=member,
        )
    except (DamagedStoreError, NotFiniteError) as error:
        steps = [s.step for s in list_snapshots(config.run.dir) if s.step != from_step]
        if steps and not fresh:
            error.add_note(
                f"there are snapshots of steps {', '.join(map(str, steps))}: the same command with "
                f"--from-step {steps[-1]} goes back to the last of them"
            )
        raise


def _train(
    config: Config,
    *,
    fresh: bool,
    accept_change: bool,
    from_step: int | None,
    observe: Callable[[int, Instruction], None],
    listener: Listener | None,
    progress: Progress,
    member: Member | None,
) -> None:
    if member is None and launched() is not None:
        raise ConfigError(
            "torchrun has started several processes, and swaptrain.train runs in one: start them "
            "by torchrun ... -m swaptrain --config FILE, or unset WORLD_SIZE"
        )
    if member is None:
        check_alone(config.run.dir)
        if config.distributed.dirs is not None:
            raise ConfigError(
                "distributed.dirs gives ranks disks of their own, and this is one process, which "
                "writes to run.dir alone: leave it out, or start several with torchrun"
            )
    else:
        config = member.config

    def look() -> RunDirectory:
        return RunDirectory(config, fresh=fresh, accept_change=accept_change)

    directory = look() if member is None else in_all(member.group, look)
    config = directory.config
    import_reporters(config.train.report_to)
    with (
        named_failures(config),
        progress,
        StopRequest() as stop,
        ExitStack() as resources,
    ):
        # Before the model's capture, so that of two processes the second one is refused at once.
        resources.enter_context(directory.locked(progress.note))
        with directory.withdrawn_on(BaseException):
            root = directory.open(progress.note)
            if member is not None:
                root = member.recovered(directory.path, root)
            start = _prepared(directory, root, from_step, progress, member)
            if start is None:
                return
            samples = _samples(start, progress.note)
        with directory.withdrawn_on(ConfigError):
            training = open_run(start, resources, progress, stop, observe)
        if member is not None:
            member.opened()
        training.sample = samples
        if listener is not None:
            listener.follow(training, stop)
        # What was captured lives as long as the run: collections need not go through it again.
        gc.collect()
        gc.freeze()
        resources.callback(gc.unfreeze)
        training.run()
        finish(training, stop)
        if listener is not None:
            listener.finished(training.step - 1)
        named = directory.path if member is None else directory.path.parent
        progress.finish(finished_text(named, training.step - 1, training.config))


def _prepared(
    directory: RunDirectory,
    root: RootRecord | None,
    from_step: int | None,
    progress: Progress,
    member: Member | None,
) -> Start | None:
    """Capture and plan the model; None where all steps are done."""
    config, run_dir, note = directory.config, directory.path, progress.note
    back_to = None if from_step is None else find_snapshot(run_dir, root, from_step)
    if back_to is None and root is not None:
        step = finished_step(run_dir, root, config)
        if member is not None and not member.all(step is not None):
            step = None  # what only training needs is made again, and deleted once more
        if step is not None:
            if config.run.trace:
                note("no step is left that run.trace could write of")
            reports = open_reports(config, note)  # what a kill at the end of the run left
            reports.start(step)
            reports.close()
            named = run_dir if member is None else run_dir.parent
            progress.finish(finished_text(named, step, config))
            return None
    done = steps_done(run_dir, root) if from_step is None else from_step
    if idle := check_rates(config, done):
        note(idle)
    if member is None:
        beside, prepared = NOBODY, Prepared(config, root, note)
    else:
        beside = member.beside
        prepared = Prepared(config, root, note, beside=beside)
    config = prepared.config
    if root is not None:
        _check_choices(run_dir, root, prepared, progress)
    try:
        check_memory(config.memory.host, prepared.plan, note, processes=beside.local_count)
    except BudgetError as error:
        error.is_echo = beside.local_rank > 0  # the first rank of each machine says it
        raise
    if root is None and not beside.ranks.rank:
        check_capture(config, prepared, note)
    if member is not None:
        member.agree_on_model(prepared)
    recorded = directory.recorded
    before = recorded.resolved().optimizer if recorded is not None else None
    group = None if member is None else member.group
    return Start(config, prepared, root, directory.fresh, before, back_to, group)


def _samples(start: Start, note: Callable[[str], None]) -> Samples | None:
    held_out = start.config.eval
    if held_out is None or not held_out.samples:
        return None
    try:
        return Samples(start.config, start.prepared.built.initial.module, note)
    except ConfigError as error:
        raise ConfigError(f"eval.samples: {error}") from error


def _check_choices(run_dir: Path, root: RootRecord, prepared: Prepared, progress: Progress) -> None:
    """Refuse another device than the store was begun on; say once what else is another."""
    device = prepared.device.device.type
    recorded = root.choices.update_device.partition(":")[0]
    if device != recorded:
        raise ConfigError(
            f"the run was begun on {recorded} and would go on on {device}, with other bits: set "
            f"device to {recorded}, or start over with --fresh"
        )
    now = this_machine(prepared.device.device)
    note_changes(run_dir, root, now, progress.note)


if sys.platform != "linux":  # O_DIRECT, flock, /proc
    raise ConfigError("swaptrain runs on Linux")
