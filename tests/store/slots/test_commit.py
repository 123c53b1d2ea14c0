"""Commits: nothing is switched before it is durable, and no kill loses the last commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from swaptrain.errors import RunError
from swaptrain.store.format.layout import SegmentLayout
from swaptrain.store.format.record import read_record
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.store.slots.commit import Checksums, Write
from tests.store.helpers import SmallStore, aligned, array, spec

LAYOUTS = [
    SegmentLayout((array("weights", [spec(f"w{k}", (3000,))]), array("m", [spec(f"w{k}", (9,))])))
    for k in (1, 2)
]


def _contents(k: int, version: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng([k, version])
    return {
        "weights": {f"w{k}": rng.random(3000, dtype=np.float32)},
        "m": {f"w{k}": rng.random(9, dtype=np.float32)},
    }


@pytest.fixture
def store(tmp_path: Path) -> SmallStore:
    return SmallStore(tmp_path, LAYOUTS)


def test_a_commit_is_read_back(store: SmallStore) -> None:
    """After a commit the live slot has the new bytes, and its record their checksums."""
    for version in (0, 1, 2):
        for k in (2, 1):
            store.commit(k, version, _contents(k, version))
    for k in (1, 2):
        slot = store.slots.live(k)
        record = slot.read_record(k)
        assert (record.segment, record.version) == (k, 2)
        buffer = aligned(slot.array("weights").nbytes)
        checksums = record.checksums["weights"]
        for future in slot.array("weights").read(store.io, buffer, checksums=checksums):
            future.result()
        found = np.frombuffer(buffer, np.float32, 3000)
        np.testing.assert_array_equal(found, _contents(k, 2)["weights"][f"w{k}"])
    store.close()


def test_the_order_of_a_commit(
    store: SmallStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every chunk and hand-off file is flushed before the record, the record before the rename,
    the directory after it; then the old slot is free and `after` runs."""
    for k in (2, 1):
        store.commit(k, 0, _contents(k, 0))
    handoff = ArrayFiles(tmp_path / "handoff", "float32", 4096, 1, rows=2)
    handoff.path.mkdir()
    handoff.create()
    events: list[str] = []
    lock = threading.Lock()

    def note(name: str, target: object) -> None:
        with lock:
            events.append(f"{name} {target}")

    plain = {name: getattr(os, name) for name in ("fdatasync", "fsync", "pwritev", "pwrite")}

    def path_of(descriptor: int) -> str:
        return str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path))

    for name, function in plain.items():

        def spy(descriptor: int, *arguments: object, name: str = name, function=function):  # type: ignore[no-untyped-def]
            result = function(descriptor, *arguments)
            note(name, path_of(descriptor))
            return result

        monkeypatch.setattr(os, name, spy)
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda a, b: (replace(a, b), note("rename", b.relative_to(tmp_path)))[0]
    )
    slot = store.committer.take(LAYOUTS[0].shape_class)
    old = store.slots.live(2)

    def after() -> None:
        assert old in store.slots.free(LAYOUTS[0].shape_class)
        note("after", "")

    writes = [Write(a, aligned(a.nbytes)) for a in slot.arrays.values()]
    store.committer.commit(
        2,
        slot,
        lambda sums: {"version": 1, "handoff": sums.handoff, "n": len(sums.arrays)},
        store.committer.begin(writes),
        [Write(handoff, aligned(4096), row=1)],
        after,
    ).result()
    monkeypatch.undo()
    record = events.index(f"pwrite slots/{slot.id}/zarr.json")
    flushed = {
        f"fdatasync slots/{slot.id}/{a.name}/c/{chunk}"
        for a in slot.arrays.values()
        for chunk in range(a.chunks)
    } | {"fdatasync handoff/c/1/0"}
    assert flushed <= set(events[:record])
    assert {event.replace("fdatasync", "pwritev") for event in flushed} <= set(events[:record])
    assert events[record + 1 :] == [
        f"fdatasync slots/{slot.id}/zarr.json",
        "rename store/segments/002",
        "fsync store/segments",
        "after ",
    ]
    store.close()


@pytest.mark.parametrize("fault", ["chunk", "record", "switch"])
def test_after_an_error_nothing_is_switched(
    store: SmallStore, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The commit that meets an error and all later ones fail with it; live slots stay as they
    were; nothing is tried again."""
    for k in (2, 1):
        store.commit(k, 0, _contents(k, 0))
    live = {k: store.slots.live(k) for k in (1, 2)}
    slot = store.committer.take(LAYOUTS[0].shape_class)
    faults = []

    def fail(*arguments: object) -> int:
        faults.append(arguments)
        raise OSError(5, "Input/output error")

    if fault == "record":
        monkeypatch.setattr(os, "pwrite", fail)
    elif fault == "switch":
        monkeypatch.setattr(os, "symlink", fail)
    else:
        monkeypatch.setattr(os, "pwritev", fail)
    writes = [Write(slot.array("weights"), aligned(slot.array("weights").nbytes))]
    started = store.committer.begin(writes)
    first = store.committer.commit(2, slot, lambda sums: {"version": 1}, started)
    with pytest.raises(RunError, match="Input/output error"):
        first.result()
    count = len(faults)
    monkeypatch.undo()
    second = store.committer.commit(1, slot, lambda sums: {"version": 1}, [])
    with pytest.raises(RunError, match="Input/output error"):
        store.committer.begin(writes)
    with pytest.raises(RunError, match="Input/output error"):
        second.result()
    with pytest.raises(RunError, match="Input/output error"):
        store.committer.take(LAYOUTS[0].shape_class)
    with pytest.raises(RunError, match="Input/output error"):
        store.committer.drain()
    assert len(faults) == count
    assert {k: store.slots.live(k) for k in (1, 2)} == live
    store.close()


def test_taking_a_slot_waits_for_the_commit_before(store: SmallStore) -> None:
    """With one free slot, the second commit begins when the first switch is durable; without any
    commit in flight an empty pool is an error, not a hang."""
    for k in (2, 1):
        store.commit(k, 0, _contents(k, 0))
    kind = LAYOUTS[0].shape_class
    slot, old = store.committer.take(kind), store.slots.live(2)
    gate = threading.Event()

    def record(checksums: Checksums) -> dict[str, object]:
        gate.wait(10)
        return {"version": 1}

    store.committer.commit(2, slot, record, [])
    threading.Timer(0.1, gate.set).start()
    assert store.committer.take(kind) == old
    store.committer.drain()
    with pytest.raises(RunError, match="no slot of shape class"):
        store.committer.take(kind)
    store.close()


def test_a_spilled_gradient_gets_a_record(store: SmallStore, tmp_path: Path) -> None:
    """In deferred mode arrays are overwritten in place, flushed, and then described."""
    gradient = ArrayFiles(tmp_path / "g", "float32", 4096, 2)
    gradient.path.mkdir()
    gradient.create()
    path = tmp_path / "g.json"
    path.write_bytes(b" " * 4096)
    buffer = aligned(8192)
    buffer[:] = os.urandom(8192)
    store.committer.write(
        path, 4096, lambda sums: {"sums": sums.handoff}, [Write(gradient, buffer)]
    ).result()
    (sums,) = read_record(path)["sums"]
    back = aligned(8192)
    for future in gradient.read(store.io, back, checksums=sums):
        future.result()
    assert back == buffer
    store.close()


def test_actions_come_after_what_was_submitted_before(store: SmallStore) -> None:
    """What waits for commits runs when they are durable, in order."""
    kind = LAYOUTS[0].shape_class
    slot = store.committer.take(kind)
    seen: list[str] = []
    store.committer.commit(2, slot, lambda sums: {"version": 1}, [])
    store.committer.then(lambda: seen.append(store.slots.live(2).id))
    store.committer.drain()
    assert seen == [slot.id]
    store.close()


DRIVER = Path(__file__).with_name("kill_driver.py")


def test_no_kill_loses_the_last_commit(tmp_path: Path) -> None:
    """A writer killed at ten random moments leaves live slots that verify whole, in a pattern
    that recovery accepts, with the hand-off it needs; each run goes on where the last one was."""
    run = subprocess.run(
        [sys.executable, str(DRIVER), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(results) == 10
    steps = [result["step"] for result in results]
    assert steps == sorted(steps)
    assert steps[-1] > 0
