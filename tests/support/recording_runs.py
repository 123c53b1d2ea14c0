"""Small training runs in forked children: recorded, or simply brought to their end."""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import swaptrain.verbs.train as training
from swaptrain.config.schema import Config
from swaptrain.data import Opening
from swaptrain.durable.tree_commits import Trees
from swaptrain.observe.metrics import MetricsFile
from swaptrain.planning import prepare
from swaptrain.planning import roofline as floor
from swaptrain.planning.prepare import Prepared
from swaptrain.run.go_back import go_back
from swaptrain.run.start_over import start_over
from swaptrain.store.disk import durable_files as files
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.root import create_root
from swaptrain.store.slots.commit import Committer
from swaptrain.store.slots.slots import Slots
from swaptrain.store.slots.snapshots import Snapshots
from tests.support.forking import fork
from tests.support.killing import final_state, metrics_key
from tests.support.recording import Event, Recorder
from tests.support.recording_sabotage import SABOTAGES
from tests.support.runs import config_of

_NONE: Mapping[str, Any] = {}

__all__ = ["End", "Job", "Recording", "data_files"]


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a run did to its disks, and the error that ended it, if one did."""

    events: list[Event]
    error: str | None


@dataclasses.dataclass(frozen=True)
class End:
    """What a run leaves behind, by which two runs are compared."""

    state: dict[str, str]
    lines: list[list[Any]]
    data: dict[str, bytes]


class Job:
    """A config, captured once, whose run lies on disks of its own below a folder.

    `tree` is that of `config_of`; in its strings `{folder}` is the folder. The disks are
    FOLDER/disk, with the run, and FOLDER/disk1 to disk3, which the config may name.
    """

    def __init__(self, folder: Path, tree: dict[str, Any], *, pool: float = 1.3) -> None:
        folder = folder.resolve()
        self.disks = [folder / "disk", *(folder / f"disk{n}" for n in (1, 2, 3))]
        self.run_dir = self.disks[0] / "run"
        self.config = _config(folder, tree)
        for disk in self.disks:
            disk.mkdir(parents=True, exist_ok=True)
        # Thousands of states are put there and opened: a RAM disk is the right place for them.
        prepare.refuse_tmpfs = lambda _: None
        prepared = Prepared(self.config.resolved(), None, lambda _: None)
        pool_bytes = int(prepared.plan.peaks.instruction_bytes * pool)
        prepared.plan = dataclasses.replace(prepared.plan, pool_bytes=pool_bytes)
        self.prepared = prepared
        self.io = DirectIO()  # has no thread before its first request

    def record(
        self, *, steps: int | None = None, sabotage: str | None = None, **options: Any
    ) -> Recording:
        """Train from what the disks hold now; return what that does to them.

        `options` are those of `train`; `sabotage` names an order of flushes that is wrong.
        """

        def action() -> Recording:
            recorder = Recorder(self.disks)
            _mark(recorder)
            if sabotage is not None:
                SABOTAGES[sabotage]()
            recorder.install()
            error = self.train(steps, options)
            return Recording(recorder.events, error)

        return _in_child(action)

    def finish(self, *, steps: int | None = None) -> str | None:
        """Train to the end from what the disks hold; return the error if that fails."""

        def action() -> str | None:
            # Nothing here needs to outlast a power failure.
            files.syncfs = lambda _: None
            os.fsync = os.fdatasync = lambda _: None
            return self.train(steps)

        return _in_child(action)

    def end(self) -> End:
        """Return what the run has left."""
        return End(final_state(self.run_dir), metrics_key(self.run_dir), data_files(self.disks))

    def train(self, steps: int | None = None, options: Mapping[str, Any] = _NONE) -> str | None:
        """Train in this process; return the error that ends it."""
        training.Prepared = lambda *_: self.prepared  # type: ignore[assignment,misc]
        # What measures the disk leaves nothing, and makes thousands of requests: of moments here.
        floor.machine = lambda *_: None
        config = self.config
        if steps is not None:
            changed = config.train.model_copy(update={"steps": steps})
            config = config.model_copy(update={"train": changed})
        try:
            training.train(config, **options)
        except Exception as error:
            return "".join(traceback.format_exception(error))[-2000:]
        return None


def data_files(disks: list[Path]) -> dict[str, bytes]:
    """Return the bytes of every complete token array, by its digest and the file."""
    found = {}
    for root in (disks[0] / "run" / "data", disks[3] / "cache"):
        for marker in root.glob("*/complete"):
            for path in sorted(marker.parent.rglob("*")):
                if path.is_file() and path.name != "lock":
                    name = f"{marker.parent.name}/{path.relative_to(marker.parent)}"
                    found[name] = path.read_bytes()
    return found


def _config(folder: Path, tree: dict[str, Any]) -> Config:
    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [placed(inner) for inner in value]
        return value.replace("{folder}", str(folder)) if isinstance(value, str) else value

    run = {"run": {"dir": str(folder / "disk" / "run")}}
    return config_of(folder / "config", {**placed(tree), **run})


def _in_child(action: Callable[[], Any]) -> Any:
    """Return what `action` returns in a forked child."""
    reading, writing = os.pipe()
    child = fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            result = action()
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(result, pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a child ended with status {status}")
    return pickle.loads(content)


def _everywhere(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Replace a function in all modules that have imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("swaptrain.") and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, other)


def _mark(recorder: Recorder) -> None:
    """Write down when something counts as done: from then on no power failure may take it back."""

    def marked(original: Callable[..., Any], what: Callable[..., tuple[Any, ...]]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            recorder.mark(*what(*args, **kwargs))
            return result

        return call

    def before(original: Callable[..., Any], *what: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.mark(*what)
            return original(*args, **kwargs)

        return call

    for target, name, what in (
        (MetricsFile, "append", lambda _, row: ("line", row.step)),
        (Opening, "keep", lambda _: ("data",)),
        (Trees, "switch", lambda _, step: ("tree", step)),
        (Slots, "switch_tree", lambda _: ("created",)),
        (Snapshots, "make", lambda _, step, losses: ("snapshot", step)),
    ):
        setattr(target, name, marked(getattr(target, name), what))
    # The root of a tree is one of a store only once the tree is switched to.
    created = marked(create_root, lambda *_, tree=None: ("-",) if tree else ("created",))
    _everywhere(create_root, created)
    _everywhere(start_over, before(start_over, "fresh"))
    _everywhere(go_back, before(go_back, "back"))
    commit, write = Committer.commit, Committer.write

    def done(kind: str, made: list[dict[str, Any]]) -> Callable[[Any], None]:
        def note(future: Any) -> None:
            if future.exception() is None:
                recorder.mark(kind, made[0]["segment"], made[0]["version"])

        return note

    def kept(made: list[dict[str, Any]], record: Any) -> Callable[[Any], dict[str, Any]]:
        def make(checksums: Any) -> dict[str, Any]:
            made.append(record(checksums))
            return made[0]

        return make

    def committed(self: Any, segment: int, slot: Any, record: Any, *rest: Any, **how: Any) -> Any:
        made: list[dict[str, Any]] = []
        future = commit(self, segment, slot, kept(made, record), *rest, **how)
        if how.get("switch", True):
            future.add_done_callback(done("committed", made))
        return future

    def written(self: Any, path: Path, size: int, record: Any, *rest: Any, **how: Any) -> Any:
        made: list[dict[str, Any]] = []
        future = write(self, path, size, kept(made, record), *rest, **how)
        future.add_done_callback(done(path.parents[1].name, made))
        return future

    Committer.commit, Committer.write = committed, written  # type: ignore[method-assign]
