"""Another machine is said once; what was measured of one is measured again where it is no use."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import swaptrain.machine.speeds as measured
from swaptrain.machine.fingerprint import note_changes, this_machine
from swaptrain.machine.speeds import Machine, cache_path, known_machine, machine
from swaptrain.program.cost import Disk, IOWork
from swaptrain.store.paths import RunPaths
from tests.store.helpers import small_root

CPU = torch.device("cpu")


def test_a_change_is_said_once(tmp_path: Path) -> None:
    """At the first start on another machine, and again when the run comes back."""
    here = this_machine(CPU)
    root = small_root(choices={"machine": here})
    assert here["processor"] and here["kernels"] and here["torch"] == torch.__version__
    there = {**here, "processor": "Other 9000", "instructions": "avx avx2"}
    said: list[str] = []
    for now, count in ((here, 0), (there, 1), (there, 1), (here, 2), (here, 2)):
        note_changes(tmp_path, root, now, said.append)
        assert len(said) == count
    assert "Other 9000" in said[0] and "the last bits" in said[0] and "torch" not in said[0]


@pytest.mark.parametrize("note", [b"", b"[", b"[]", b'{"processor": 3}', b"\xff", b"[" * 10**5])
def test_a_spoilt_note_is_passed_over(tmp_path: Path, note: bytes) -> None:
    """The run goes on whatever the file says, and no control characters are shown."""
    (RunPaths(tmp_path).last_machine).write_bytes(note)
    said: list[str] = []
    root = small_root(choices={"torch": "1.0"})
    note_changes(tmp_path, root, this_machine(CPU), said.append)
    assert all(text.isprintable() for text in said)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Return the list of the speeds that were measured; each time it is faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    taken: list[float] = []

    def measure(*_: Any) -> Machine:
        taken.append(1e9 + len(taken))
        return Machine(
            Disk(taken[-1], 1e9, 1e9), 0.5, IOWork(1e-4, 1e-11, 1e-10, 1e-3), {"float32": 1e10}
        )

    monkeypatch.setattr(measured, "measure", measure)
    return taken


def ask(tmp_path: Path) -> Machine | None:
    return machine(tmp_path, CPU, ["float32"], lambda _: None)


def test_a_machine_is_measured_once(tmp_path: Path, measurements: list[float]) -> None:
    """And again for another processor, or another disk."""
    assert ask(tmp_path) == ask(tmp_path) == known_machine(tmp_path, CPU)
    assert len(measurements) == 1
    with pytest.MonkeyPatch.context() as patch:
        other = {**this_machine(CPU), "processor": "Other 9000"}
        patch.setattr(measured, "this_machine", lambda _: other)
        ask(tmp_path)
        assert len(measurements) == 2
    ask(tmp_path)
    assert len(measurements) == 2


def test_a_busy_machine_is_measured_again(
    tmp_path: Path, measurements: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is idle, and the better figures are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (1e3, 1e3, 1e3))
        ask(tmp_path)
        ask(tmp_path)
        assert len(measurements) == 1
    found = ask(tmp_path)
    assert found is not None and found.disk.read_bytes_per_s == max(measurements)
    ask(tmp_path)
    assert len(measurements) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: "text",
        lambda entry: {**entry, "sigma": "much"},
        lambda entry: {**entry, "sigma": -1.0},
        lambda entry: {**entry, "io_work": {**entry["io_work"], "request_s": -1.0}},
        lambda entry: {**entry, "io_work": {**entry["io_work"], "commit_s": 2.0}},
        lambda entry: {**entry, "io_work": {}},
        lambda entry: {**entry, "disk": {**entry["disk"], "read_bytes_per_s": 0.0}},
        lambda entry: {**entry, "disk": {**entry["disk"], "read_bytes_per_s": 1e300}},
        lambda entry: {**entry, "disk": {"speed": 1.0}},
        lambda entry: {**entry, "flops_per_s": {"float32": True}},
        lambda entry: {**entry, "flops_per_s": [1]},
        lambda entry: None,
    ],
)
def test_spoilt_figures_are_measured_again(
    tmp_path: Path, measurements: list[float], spoil: Any
) -> None:
    """Whatever the cache says, nobody reckons with it."""
    expected = ask(tmp_path)
    tree = json.loads(cache_path().read_text())
    cache_path().write_text(json.dumps({key: spoil(entry) for key, entry in tree.items()}))
    assert known_machine(tmp_path, CPU) is None
    assert ask(tmp_path) != expected and len(measurements) == 2
    cache_path().write_bytes(b"[" * 10**5)
    assert ask(tmp_path) is not None and len(measurements) == 3
