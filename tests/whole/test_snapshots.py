"""Snapshots: what they hold, going back to them, and what changes between two starts do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import zarr

from swaptrain.errors import ConfigError, DamagedStoreError, NotFiniteError
from swaptrain.planning.budgets import disk_budget as disk
from swaptrain.store.slots.snapshots import list_snapshots
from swaptrain.verbs.inspection.report import read_run
from swaptrain.verbs.plan import plan
from tests.support.killing import final_state, metrics_key
from tests.support.matrix import proof_but
from tests.support.runs import config_of, rows, trained
from tests.support.serving import Server

pytestmark = pytest.mark.trains

GPT: dict[str, Any] = {
    "model": {"python": "tests.support.models:gpt", "kwargs": {"layers": 1}},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "16KiB"},
    "train": {"steps": 6},
}
CNN: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 6},
}
MLP: dict[str, Any] = {
    "model": {"python": "tests.support.models:frozen_mlp"},
    "data": {"python": "tests.support.datasets:vectors"},
    "memory": {"segment": "1KiB"},
}
CLIPPED = {"optimizer": {"clip_norm": 0.3}}
TREES = {"store": {"commit": {"every": 4}}}
MODES: dict[str, dict[str, Any]] = {
    "fused": GPT,
    "clipped": {**CNN, **CLIPPED},
    "trees": {**GPT, **TREES},
    "trees-clipped": {**CNN, **CLIPPED, **TREES},
}
KEEP = {"every": 2, "last": 2}


def ask(server: Server, folder: Path, do: str, tree: dict[str, Any], **plan: Any) -> dict[str, Any]:
    """Have a job with snapshots killed, or go back."""
    plan = {"do": do, "folder": str(folder), "tree": tree, "keep": KEEP, **plan}
    return server.ask("tests.support.killing_snapshots", **plan)


SLOW = {"trees-clipped", "trees"}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=pytest.mark.whole if m in SLOW else pytest.mark.proof) for m in MODES],
)
def test_going_back_and_on_again_changes_no_bit(mode: str, server: Server, tmp_path: Path) -> None:
    """A run with snapshots ends as one without, and again from each, from the end and from inside.

    At the end the last step is on the disk twice, and no slot is left that nothing points to.
    """
    report = ask(server, tmp_path, "go back", MODES[mode])
    assert not report["wrong"]
    assert report["steps"] == [4, 6]
    assert report["kills"] > 0


@pytest.mark.parametrize("store", proof_but([{}, TREES], {}), ids=["fused", "trees"])
def test_a_kill_in_making_or_going_back_changes_no_bit(
    store: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    """Killed there, the next start does the rest, and no slot is lost or used too early."""
    tree = {**MLP, **store, "train": {"steps": 6}}
    report = ask(server, tmp_path, "kill", tree, stride=6)
    assert not report["wrong"]
    assert report["kills"] > 4


@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
def test_a_kill_in_any_call_of_making_or_going_back_changes_no_bit(
    mode: str, server: Server, tmp_path: Path
) -> None:
    """The same at each system call that changes the disk."""
    report = ask(server, tmp_path, "kill", MODES[mode], stride=1)
    assert not report["wrong"]
    assert report["kills"] > 20


def keeping(every: int, last: int, **train: Any) -> dict[str, Any]:
    """Return the smallest model's config with snapshots."""
    return {**MLP, "store": {"keep": {"every": every, "last": last}}, "train": train}


def steps(run_dir: Path) -> list[int]:
    return [snapshot.step for snapshot in list_snapshots(run_dir)]


def contents(run_dir: Path) -> dict[Path, int]:
    """Return what there is and when it was changed; the lock says anew who holds it."""
    paths = (path for path in run_dir.rglob("*") if path.name != "lock")
    return {path: path.lstat().st_mtime_ns for path in paths}


def slot_count(run_dir: Path) -> int:
    return sum(1 for _ in (run_dir / "slots").iterdir())


@pytest.mark.proof
def test_settings_change_between_two_starts(tmp_path: Path) -> None:
    """More or fewer are kept, or no new ones are made; slots come and go with them."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    trained(config_of(run_dir, {**MLP, "train": {"steps": 2}}))
    segments = slot_count(run_dir)
    trained(config_of(run_dir, keeping(1, 3, steps=5)))
    assert (steps(run_dir), slot_count(run_dir)) == ([3, 4, 5], 4 * segments)
    trained(config_of(run_dir, {**MLP, "train": {"steps": 6}}))
    assert (steps(run_dir), slot_count(run_dir)) == ([3, 4, 5], 4 * segments)
    trained(config_of(run_dir, keeping(4, 1, steps=7)))
    assert (steps(run_dir), slot_count(run_dir)) == ([5], 2 * segments)
    trained(config_of(run_dir, keeping(4, 2, steps=9)))
    assert (steps(run_dir), slot_count(run_dir)) == ([5, 8], 3 * segments)
    trained(config_of(whole, {**MLP, "train": {"steps": 9}}))
    assert final_state(run_dir) == final_state(whole)
    assert metrics_key(run_dir) == metrics_key(whole)


@pytest.mark.proof
def test_slots_on_several_disks_are_kept_and_gone_back_to(tmp_path: Path) -> None:
    """The slots of snapshots lie on the disks in turn, and what is dropped leaves nothing there."""
    disks = [str(tmp_path / "x"), str(tmp_path / "y")]
    tree = keeping(2, 1, steps=4)
    tree["store"]["paths"] = disks
    config = config_of(tmp_path / "run", tree)
    run_dir = trained(config)
    state, lines = final_state(run_dir), metrics_key(run_dir)
    shutil.rmtree(run_dir / "snapshots" / "00000004")
    trained(config_of(run_dir, {**tree, "train": {"steps": 6}}))
    assert steps(run_dir) == [6]
    found = [sum(1 for _ in Path(disk).glob("*/*/*")) for disk in disks]
    assert min(found) > 0 and sum(found) == slot_count(run_dir)
    whole = trained(config_of(tmp_path / "whole", {**MLP, "train": {"steps": 6}}))
    trained(config_of(run_dir, {**tree, "train": {"steps": 6}}), from_step=6)
    assert final_state(run_dir) == final_state(whole) != state
    assert metrics_key(run_dir)[:4] == lines


def test_a_step_without_a_snapshot_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    """Exit code 2, and nothing is touched; the same where there are none at all."""
    config = config_of(tmp_path / "run", keeping(2, 2, steps=5))
    with pytest.raises(ConfigError, match="there is no run"):
        trained(config, from_step=2)
    assert not config.run.dir.exists()
    run_dir = trained(config)
    before = contents(run_dir)
    with pytest.raises(ConfigError, match="no snapshot of it, there are those of 2, 4"):
        trained(config, from_step=3)
    assert contents(run_dir) == before
    other = config_of(tmp_path / "other", {**MLP, "train": {"steps": 1}})
    trained(other)
    with pytest.raises(ConfigError, match=r"it has none; store\.keep"):
        trained(other, from_step=1)


def test_going_back_helps_where_the_live_state_is_damaged(tmp_path: Path) -> None:
    """Chunks, a record and a live name are gone: the error names the way back, and it works."""
    config = config_of(tmp_path / "run", keeping(2, 2, steps=5))
    run_dir = trained(config)
    state, lines = final_state(run_dir), metrics_key(run_dir)
    names = sorted(link for link in (run_dir / "store" / "segments").glob("0*"))
    (names[0] / "zarr.json").write_bytes(b"")
    for chunk in names[1].glob("*/c/0"):
        chunk.unlink()
    with pytest.raises(DamagedStoreError) as damage:
        trained(config)
    assert "--from-step 4" in damage.value.__notes__[0]
    names[1].unlink()
    trained(config, from_step=4)
    assert (final_state(run_dir), metrics_key(run_dir)) == (state, lines)


@pytest.mark.proof
def test_a_snapshot_that_does_not_verify_is_not_gone_back_to(tmp_path: Path) -> None:
    """The error names the chunk and another snapshot, and nothing is touched."""
    config = config_of(tmp_path / "run", keeping(2, 2, steps=5))
    run_dir = trained(config)
    chunk = run_dir / "snapshots" / "00000004" / "001" / "exp_avg" / "c" / "0"
    content = bytearray(chunk.read_bytes())
    content[7] ^= 1
    chunk.write_bytes(content)
    before = contents(run_dir)
    with pytest.raises(DamagedStoreError, match="segment 1, array exp_avg, chunk 0") as damage:
        trained(config, from_step=4)
    assert "--from-step 2" in damage.value.__notes__[0]
    assert contents(run_dir) == before
    state = final_state(run_dir)
    trained(config, from_step=2)
    assert final_state(run_dir) == state


@pytest.mark.proof
def test_another_learning_rate_can_be_tried_from_a_snapshot(tmp_path: Path) -> None:
    """With --accept-change, from the step after it on; later snapshots are gone at once."""
    new = {"optimizer": {"lr": 0.003}}
    whole = config_of(tmp_path / "whole", keeping(2, 3, steps=2))
    trained(whole)
    trained(config_of(whole.run.dir, {**keeping(2, 3, steps=6), **new}), accept_change=True)
    config = config_of(tmp_path / "run", keeping(2, 3, steps=6))
    run_dir = trained(config)
    assert steps(run_dir) == [2, 4, 6]
    changed = config_of(run_dir, {**keeping(3, 3, steps=6), **new})
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        trained(changed, from_step=2)
    trained(changed, from_step=2, accept_change=True)
    assert steps(run_dir) == [2, 3, 6]
    assert final_state(run_dir) == final_state(whole.run.dir)
    assert metrics_key(run_dir) == metrics_key(whole.run.dir)


def test_a_gradient_that_is_not_finite_leaves_a_way_back(tmp_path: Path) -> None:
    """A step that would meet it again and again says which snapshot to go back to."""
    tree = {**keeping(1, 1, steps=3), "data": {"python": "tests.whole.test_not_finite:poisoned"}}
    with pytest.raises(NotFiniteError) as error:
        trained(config_of(tmp_path / "run", tree))
    assert "--from-step 1" in error.value.__notes__[0]


@pytest.mark.proof
def test_the_disk_that_snapshots_take_is_planned_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan shows it, and a start that asks for more than is free is refused with figures."""
    run_dir = tmp_path / "run"
    same = {"steps": 2, "recompute": True}  # what is saved, and its room, comes from measured times
    (without,) = plan(config_of(run_dir, {**MLP, "train": same})).disk
    (need,) = plan(config_of(run_dir, keeping(1, 3, **same))).disk
    assert without.snapshots_bytes == 0
    assert need.snapshots_bytes == need.total_bytes - without.total_bytes
    trained(config_of(run_dir, {**MLP, "train": {"steps": 2}}))
    before = contents(run_dir)
    monkeypatch.setattr(disk, "free_bytes", lambda _: without.total_bytes)
    with pytest.raises(ConfigError, match=r"for snapshots, .* are free: .*store\.keep\.last"):
        trained(config_of(run_dir, keeping(1, 3, steps=4)))
    assert contents(run_dir) == before
    trained(config_of(run_dir, {**MLP, "train": {"steps": 4}}))


def test_inspect_and_zarr_see_the_snapshots(tmp_path: Path) -> None:
    """Steps and the disk that each one takes; its directory opens as a group of segments."""
    run_dir = trained(config_of(tmp_path / "run", keeping(2, 2, steps=4)))
    report = read_run(run_dir)
    assert [row.step for row in report.snapshots] == [2, 4]
    assert all(row.own_bytes > 0 for row in report.snapshots)
    last = list_snapshots(run_dir)[-1]
    assert last.record.step == 4
    group = zarr.open_group(last.path, mode="r")
    live = zarr.open_group(run_dir / "store" / "segments", mode="r")
    for k in last.slots:
        name = f"{k:03d}/weights"
        assert (group[name][...] == live[name][...]).all()
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3, 4]
