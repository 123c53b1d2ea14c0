"""How a run goes on: what is flushed before anything is decided, and the decision tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from swaptrain.errors import DamagedStoreError
from swaptrain.store.disk.durable_files import drop_cached, flush_file_systems
from swaptrain.store.paths import TREES, ZARR_JSON, RunPaths

__all__ = ["Action", "Decision", "Found", "decide", "flush_everything", "last_commit"]


class Action(StrEnum):
    """What a run does first."""

    CREATE = "create"
    """Go on creating the store."""
    BEGIN = "begin"
    """Begin a step with the forward of segment 1."""
    CONTINUE = "continue"
    """Continue a step with the backward of a segment, from the hand-off of the one above."""


@dataclass(frozen=True)
class Decision:
    """Where a run goes on."""

    action: Action
    step: int = 0
    """The step that is begun or continued."""
    segment: int = 0
    """The segment whose backward comes next, if the step is continued."""
    pending: tuple[int, ...] = ()
    """Segments whose update of the step before is still to be done, before their forward."""

    @property
    def done(self) -> int:
        """The last step that is done: its line of metrics is written if missing, later ones go."""
        return max(0, self.step - 1)


@dataclass(frozen=True)
class Found:
    """What is on disk and verifies."""

    versions: tuple[int | None, ...] | None
    """Versions of the live slots of segments 1 to L; None for a segment that has no state to be
    updated; None instead of all when there is no root."""
    gradients: tuple[int | None, ...] | None = None
    """Deferred mode: versions of the spilled gradients; None for a record that does not verify."""
    handoffs: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    """(segment, step) of the hand-offs that verify."""
    is_whole: bool = False
    """Whether the store is committed as a whole."""
    root_step: int = 0
    """The step that the root's record says, where it is."""


def last_commit(
    versions: Mapping[int, int], gradients: Mapping[int, int] | None
) -> tuple[int, int] | None:
    """Return segment and step of the commit whose hand-off an interrupted step goes on from.

    By the versions of the live slots and, in deferred mode, of the gradients whose records verify,
    by segment; None where no step was being committed. Commits go from the last segment down: what
    lies below a hole is of an earlier attempt at the step.
    """
    newest = max(versions.values(), default=0)
    step, commits = (newest, versions) if gradients is None else (newest + 1, gradients)
    done = {k for k, version in commits.items() if version == step}
    missing = max(versions.keys() - done, default=0)
    above = [k for k in done if k > missing]
    return (min(above), step) if missing and above else None


def decide(found: Found) -> Decision:
    """Return what to do, by the tables of the commit protocol.

    Raises DamagedStoreError, listing the versions, for a pattern that no crash leaves behind.
    """
    if found.versions is None:
        return Decision(Action.CREATE)
    with_state = [k for k, version in enumerate(found.versions, 1) if version is not None]
    versions = {k: v for k, v in enumerate(found.versions, 1) if v is not None}
    if not with_state:
        raise DamagedStoreError("the store has no segment with state to update")
    if found.gradients is None:
        if found.is_whole:
            return _decide_tree(found, versions, None)
        return _decide_fused(found, versions)
    gradients = {k: found.gradients[k - 1] for k in with_state}
    if found.is_whole:
        return _decide_tree(found, versions, gradients)
    return _decide_deferred(found, versions, gradients)


def _decide_fused(found: Found, versions: dict[int, int]) -> Decision:
    step = max(versions.values())
    committed = [k for k, version in versions.items() if version == step]
    if len(committed) == len(versions):
        return Decision(Action.BEGIN, step + 1)
    lowest = min(committed)
    # The committed ones are all above the others, which are exactly one step behind.
    if any(version != (step if k >= lowest else step - 1) for k, version in versions.items()):
        raise _mixed(found)
    if (lowest, step) not in found.handoffs:
        raise DamagedStoreError(
            f"step {step} was interrupted and cannot go on: the hand-off of segment {lowest} is "
            "missing or does not verify; start over with --fresh",
            segment=lowest,
        )
    return Decision(Action.CONTINUE, step, segment=lowest - 1)


def _decide_deferred(
    found: Found, versions: dict[int, int], gradients: dict[int, int | None]
) -> Decision:
    newest, oldest = max(versions.values()), min(versions.values())
    if newest > oldest:
        # Killed among the updates in the forward of the step after `newest`.
        behind = tuple(k for k, version in versions.items() if version < newest)
        rising = any(k > behind[0] and version == newest for k, version in versions.items())
        norms_known = all(gradient == newest for gradient in gradients.values())
        if newest - oldest > 1 or rising or not norms_known:
            raise _mixed(found)
        return Decision(Action.BEGIN, newest + 1, pending=behind)
    step = newest + 1
    if all(gradient == step for gradient in gradients.values()):
        return Decision(Action.BEGIN, step + 1, pending=tuple(versions))
    # A step that is done again overwrites gradients of the attempt before, from the last segment
    # down: a kill in that leaves a hole above others. Only the last one to be written is not there.
    above = [k for k in gradients if k != min(gradients)]
    last = gradients[min(gradients)]
    if last not in {newest, None} or any(gradients[k] not in {step, newest, None} for k in above):
        raise _mixed(found)
    missing = max(k for k, gradient in gradients.items() if gradient != step)
    lowest = min((k for k in gradients if k > missing), default=0)
    if (lowest, step) in found.handoffs:
        return Decision(Action.CONTINUE, step, segment=lowest - 1)
    return Decision(Action.BEGIN, step)


def _decide_tree(
    found: Found, versions: dict[int, int], gradients: dict[int, int | None] | None
) -> Decision:
    step = found.root_step
    if all(version == step for version in versions.values()):
        return Decision(Action.BEGIN, step + 1)
    pending = all(version == step - 1 for version in versions.values())
    if gradients is not None and pending and all(g == step for g in gradients.values()):
        return Decision(Action.BEGIN, step + 1, pending=tuple(versions))
    raise _mixed(found)


def _mixed(found: Found) -> DamagedStoreError:
    def show(values: Sequence[int | None]) -> str:
        return ", ".join("-" if value is None else str(value) for value in values)

    text = f"versions of segments 1 to {len(found.versions or ())}: {show(found.versions or ())}"
    if found.gradients is not None:
        text += f"; of their gradients: {show(found.gradients)}"
    if found.is_whole:
        text += f"; the root says step {found.root_step}"
    return DamagedStoreError(
        f"the store holds a mixture that no interruption leaves ({text}): was it copied or "
        "restored in parts? Restore it as a whole, or start over with --fresh; the verb verify "
        "lists the files that are damaged"
    )


def flush_everything(run_dir: Path) -> None:
    """Make durable what an earlier process wrote, before anything is decided by it.

    A process that was killed leaves writes and renames in the page cache: they are seen now, and a
    power loss could still undo them after something was built on them. Every file system that
    holds a part of the run is flushed as a whole: live and free names, records, hand-offs,
    gradients and metrics.jsonl among it. Raises RunError.

    Then the page cache of what recovery reads through it is dropped. Where a flush failed before,
    the kernel has forgotten that these pages were never written: they would be read as if they
    were on the disk, no flush would write them, and a power loss would take them back later.
    """
    paths = RunPaths(run_dir)
    slots = sorted(paths.slots.glob("*"))
    flush_file_systems(path for path in (run_dir, *slots) if path.exists())
    for file in _read_through_cache(paths):
        if file.is_file():
            drop_cached(file)


def _read_through_cache(paths: RunPaths) -> Iterator[Path]:
    """Yield the metrics and all records."""
    yield paths.metrics
    for tree in (None, *TREES):
        yield paths.root_record(tree)
    for folder in (paths.slots, paths.frozen):
        yield from folder.glob(f"*/{ZARR_JSON}")
    yield from paths.spill_folder("finished").glob("*/*.json")
