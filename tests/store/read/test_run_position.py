"""Where a run stands: each row of the protocol's tables, read from records on a disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from swaptrain.config.schema import Config
from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.errors import DamagedStoreError, RunError
from swaptrain.run.finish import finished_step
from swaptrain.run.idle_rates import steps_done
from swaptrain.run.resume import find_resume_point
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format.record import encode_record
from swaptrain.store.format.root import RootRecord, create_root, read_root
from swaptrain.store.format.state_record import SegmentRecord
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.run_position import Phase, RunPosition, read_position
from swaptrain.store.slots.slots import Slots
from swaptrain.verbs.export import export_weights
from swaptrain.verbs.inspection.report import read_run
from tests.store.helpers import small_root
from tests.support.runs import config_of
from tests.support.stores import MLP, STATES, Job, small_run

SEGMENTS = 3
HANDOFF = [{"name": "x", "segment": 1, "micro_batch": 0, "checksums": [7]}]


def written(
    run_dir: Path,
    versions: tuple[int | None, ...],
    gradients: tuple[int | None, ...] | None = None,
    *,
    fingerprint: str = "test",
    **root: Any,
) -> RunPosition:
    """Return the position by these versions; those of gradients are written, None as torn."""
    live = {k: SegmentRecord(**record(k, v)) for k, v in enumerate(versions, 1) if v is not None}
    choices = {"deferred": gradients is not None}
    table = small_root(len(versions), choices=choices, **root)
    for k, version in enumerate(gradients or (), 1):
        path = RunPaths(run_dir).gradient_record(k)
        path.parent.mkdir(parents=True)
        content = encode_record({**record(k, version or 0), "fingerprint": fingerprint})
        path.write_bytes(content if version is not None else content[: len(content) // 2])
    return read_position(RunPaths(run_dir), table, live)


def record(segment: int, version: int) -> dict[str, Any]:
    """Return the record of a slot, or that of a finished gradient, as far as a position goes."""
    return {
        "segment": segment,
        "version": version,
        "fingerprint": "test",
        "checksums": {},
        "losses": [],
        "norms": {},
        "handoff": {"gradients": HANDOFF},
    }


def seen(position: RunPosition) -> tuple[int, int | None, Phase | None, int | None]:
    return position.done, position.step, position.phase, position.segment


@pytest.mark.parametrize(
    ("versions", "expected", "whole"),
    [
        pytest.param((0, 0, 0), (0, None, None, None), True, id="nothing trained"),
        pytest.param((4, 4, 4), (4, None, None, None), True, id="step done"),
        pytest.param((4, 4, 5), (4, 5, Phase.BACKWARD, 2), False, id="one segment committed"),
        pytest.param((4, 5, 5), (4, 5, Phase.BACKWARD, 1), False, id="all but the first"),
        pytest.param((4, None, 5), (4, 5, Phase.BACKWARD, 2), False, id="one without state"),
    ],
)
def test_fused(tmp_path: Path, versions: Any, expected: Any, whole: bool) -> None:
    """Commits go from the last segment down; the lowest one handed its gradients on."""
    position = written(tmp_path, versions)
    assert seen(position) == expected
    assert position.is_whole == whole
    assert position.pending == () == position.gradients_used
    lowest = min((k for k, v in enumerate(versions, 1) if v == 5), default=None)
    assert (position.handoff.segment if position.handoff else None) == lowest


@pytest.mark.parametrize(
    ("versions", "gradients", "expected", "used"),
    [
        pytest.param((3, 3, 3), (4, 4, 4), (4, 4, Phase.UPDATE, 1), (1, 2, 3), id="none updated"),
        pytest.param((4, 3, 3), (4, 4, 4), (4, 4, Phase.UPDATE, 2), (2, 3), id="one updated"),
        pytest.param((4, 4, 4), (4, 4, 4), (4, None, None, None), (), id="all updated"),
        pytest.param((4, 4, 4), (4, 4, 5), (4, 5, Phase.BACKWARD, 2), (3,), id="in the backward"),
        pytest.param((4, 4, 4), (4, None, 5), (4, 5, Phase.BACKWARD, 2), (3,), id="one torn"),
        pytest.param((4, 4, 4), (4, 5, None), (4, None, None, None), (), id="torn above others"),
        pytest.param((4, 4, 4), (4, 5, 4), (4, None, None, None), (), id="of an earlier attempt"),
        pytest.param((4, 4, 4), (None,) * 3, (4, None, None, None), (), id="nothing spilled"),
    ],
)
def test_deferred(
    tmp_path: Path,
    versions: Any,
    gradients: Any,
    expected: Any,
    used: tuple[int, ...],
) -> None:
    """A step is done with its gradients; what lies below a hole is of an earlier attempt."""
    position = written(tmp_path, versions, gradients)
    assert seen(position) == expected
    assert position.gradients_used == used
    assert position.pending == (used if position.phase is Phase.UPDATE else ())
    assert (position.handoff is not None) == (position.phase is Phase.BACKWARD)
    if position.phase is Phase.BACKWARD:
        again = position.without_handoff(DamagedStoreError("it is damaged"))
        assert seen(again) == (4, None, None, None)  # the step is done again
        assert again.gradients_used == ()


@pytest.mark.parametrize(
    ("versions", "gradients", "root"),
    [
        pytest.param((4, 5, 4), None, {}, id="fused, a hole"),
        pytest.param((3, 4, 5), None, {}, id="fused, three steps"),
        pytest.param((3, 4, 4), (4, 4, 4), {}, id="deferred, updated from above"),
        pytest.param((4, 4, 3), (4, 4, None), {}, id="deferred, a pending gradient is torn"),
        pytest.param((4, 4, 4), (5, 4, 5), {}, id="deferred, the last gradient before others"),
        pytest.param(
            (5, 6, 6), None, {"commit_every": 3, "unit": "step", "step": 6}, id="trees, two steps"
        ),
        pytest.param(
            (5, 5, 5),
            None,
            {"commit_every": 3, "unit": "step", "step": 6},
            id="trees, another root",
        ),
    ],
)
def test_what_no_interruption_leaves(
    tmp_path: Path, versions: Any, gradients: Any, root: Mapping[str, Any]
) -> None:
    """Nothing is decided, and a damage says why."""
    position = written(tmp_path, versions, gradients, **root)
    assert position.decision is None and len(position.damages) == 1
    for ask in (lambda: position.done, lambda: position.is_whole, position.decided):
        with pytest.raises(DamagedStoreError):
            ask()


def test_a_fused_step_needs_its_handoff(tmp_path: Path) -> None:
    """Its weights are gone: the damage is that of the hand-off's bytes."""
    damage = DamagedStoreError("a gradient of the hand-off is damaged")
    position = written(tmp_path, (4, 4, 5)).without_handoff(damage)
    with pytest.raises(DamagedStoreError) as raised:
        position.decided()
    assert raised.value is damage


def test_gradients_of_another_model_are_none(tmp_path: Path) -> None:
    """They wait for no update of this one."""
    position = written(tmp_path, (3, 3, 3), (4, 4, 4), fingerprint="other")
    assert seen(position) == (3, None, None, None)
    assert position.is_whole


def test_trees_are_of_the_roots_step(tmp_path: Path) -> None:
    """No update is pending in a store whose commits are of whole steps."""
    position = written(tmp_path, (6, 6, 6), commit_every=3, unit="step", step=6)
    assert seen(position) == (6, None, None, None)


def test_positions_of_the_same_records_are_equal(tmp_path: Path) -> None:
    """By that a reader beside a trainer knows that nothing has changed between two looks."""
    one, two, three = (tmp_path / name for name in "abc")
    assert written(one, (4, 4, 4), (4, None, 5)) == written(two, (4, 4, 4), (4, None, 5))
    assert written(three, (4, 4, 4), (4, 4, 5)) != written(two / "x", (4, 4, 4), (4, None, 5))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """Return a maker of small runs that makes each state once."""
    made: dict[str, Job] = {}

    def job(state: str) -> Job:
        if state not in made:
            made[state] = small_run(tmp_path_factory.mktemp("run"), state)
        return made[state]

    return job


def root_of(run_dir: Path) -> RootRecord:
    root = read_root(run_dir)
    assert root is not None
    return root


@pytest.mark.trains
@pytest.mark.parametrize("state", STATES)
def test_everyone_says_the_same(jobs: Callable[[str], Job], state: str, tmp_path: Path) -> None:
    """A start, inspect, plan, export and the end of a run."""
    job = jobs(state)
    run_dir, root = job.copy(), root_of(job.config.run.dir)
    position = read_position(RunPaths(run_dir), root)
    assert read_run(run_dir).done == position.done == steps_done(run_dir, root)
    assert finished_step(run_dir, root, job.config) == (2 if state.endswith("finished") else None)
    if position.is_whole and not position.pending:
        assert export_weights(run_dir, tmp_path / "w.safetensors", None) == position.done
    else:
        with pytest.raises(RunError, match=f"step {position.step}"):
            export_weights(run_dir, tmp_path / "w.safetensors", None)
    plan, micro_batches = job.prepared.plan, job.config.data.micro_batches
    with DirectIO() as io:
        backing = DiskBacking(
            run_dir,
            plan.layouts,
            io,
            micro_batches=micro_batches,
            deferred=plan.builder.deferred,
        )
        slots = Slots(run_dir, trees=root.is_whole)
        assert find_resume_point(plan.layouts, slots, backing, root).decision == position.decision


@pytest.mark.trains
def test_a_step_that_waits_for_its_update_is_done(jobs: Callable[[str], Job]) -> None:
    """Its metrics are final, so no start reckons it among the steps that are left."""
    job = jobs("update pending")
    run_dir = job.copy()
    position = read_position(RunPaths(run_dir), root_of(run_dir))
    assert position.phase is Phase.UPDATE
    assert steps_done(run_dir, root_of(run_dir)) == position.step


@pytest.mark.trains
def test_a_run_that_goes_back_is_at_its_snapshot(
    jobs: Callable[[str], Job], tmp_path: Path
) -> None:
    """Its live names are of two steps until the next start: nobody takes weights from them."""
    run_dir = jobs("finished").copy()
    root = root_of(run_dir)
    RunPaths(run_dir).going_back.write_bytes(encode_record({"step": 1}))
    position = read_position(RunPaths(run_dir), root)
    assert seen(position) == (1, None, None, None) and position.going_back
    assert read_run(run_dir).done == 1
    with pytest.raises(RunError, match="going back to the snapshot of step 1"):
        export_weights(run_dir, tmp_path / "w.safetensors", None)


@pytest.mark.trains
def test_damage_of_records_is_told_of_the_segment(jobs: Callable[[str], Job]) -> None:
    """A record that does not verify, and a live name that is gone."""
    run_dir = jobs("finished").copy()
    paths, root = RunPaths(run_dir), root_of(run_dir)
    record_path = paths.live_link(1) / "zarr.json"
    record_path.write_bytes(record_path.read_bytes()[:-1] + b"x")
    paths.live_link(3).unlink()
    position = read_position(paths, root)
    assert [damage.segment for damage in position.damages] == [1, 3]
    assert position.decision is None


@pytest.mark.trains
def test_a_mixture_of_trees_is_not_shown_as_a_pending_update(
    jobs: Callable[[str], Job], tmp_path: Path
) -> None:
    """Of a store with the unit `step` whose root says another step than its slots."""
    run_dir = jobs("two trees").copy()
    root = root_of(run_dir)
    tree = Slots(run_dir, trees=True).tree()
    create_root(run_dir, root.model_copy(update={"step": root.step + 1}), tree=tree)
    for ask in (read_run, lambda run: export_weights(run, tmp_path / "w.safetensors", None)):
        with pytest.raises(DamagedStoreError, match="mixture"):
            ask(run_dir)


@pytest.mark.trains
def test_a_finished_run_is_at_the_step_of_its_config(
    jobs: Callable[[str], Job], tmp_path: Path
) -> None:
    """Of more steps it is not finished."""
    job = jobs("finished")
    run_dir = job.copy()
    more: Config = config_of(tmp_path / "run", {**MLP, "train": {"steps": 3}})
    assert finished_step(run_dir, root_of(run_dir), job.config) == 2
    assert finished_step(run_dir, root_of(run_dir), more) is None
