"""The states of an object on the disk: the table holds, and nothing outside it happens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import swaptrain.verbs.train as training
from swaptrain.durable import location as module
from swaptrain.durable.location import TRANSITIONS, Location, LocationEvent, OnDisk
from swaptrain.planning.prepare import Prepared
from swaptrain.program.instructions import Kind, ObjectKey
from swaptrain.store.slots.array_files import ArrayFiles
from tests.support.runs import config_of, trained
from tests.support.transition_table import Transition, documented, recorded

CONVOLUTIONAL: dict[str, Any] = {
    "model": {"python": "tests.support.models:convolutional"},
    "data": {"python": "tests.support.datasets:image_labels"},
    "memory": {"segment": "4KiB"},
    "train": {"steps": 2},
}
GPT: dict[str, Any] = {
    **CONVOLUTIONAL,
    "model": {"python": "tests.support.models:gpt"},
    "data": {"python": "tests.support.datasets:tokens"},
    "memory": {"segment": "64KiB"},
}
MODES: dict[str, dict[str, Any]] = {
    "fused": CONVOLUTIONAL,
    "in parts": {**GPT, "store": {"chunk": "8KiB"}},
    "deferred": {**CONVOLUTIONAL, "optimizer": {"clip_norm": 0.3}},
    "trees": {**CONVOLUTIONAL, "store": {"commit": {"every": 2}}},
}
TAKEN = {
    ("spill", "absent"), ("spill", "live"), ("spill", "spilled"),
    ("finish", "absent"), ("finish", "retained"), ("finish", "spilled"),
    ("begin", "live"), ("commit", "begun"), ("commit", "live"), ("commit", "finished"),
    ("switch", "live"), ("switch", "spilled"),
    ("free", "absent"), ("free", "spilled"), ("free", "finished"),
}  # fmt: skip
"""What whole steps do in any case; the rest of the table depends on how fast the disk is."""


def made(state: OnDisk) -> Location:
    files = ArrayFiles(Path("array"), "float32", 4096, 1)
    return Location(ObjectKey(Kind.VALUE, "v", 1), files, None, state)


def test_the_docstring_shows_the_table() -> None:
    """The table that is read is the table that is applied."""
    assert documented(module.__doc__) == TRANSITIONS


@pytest.mark.parametrize("state", OnDisk)
@pytest.mark.parametrize("event", TRANSITIONS)
def test_an_event_does_as_the_table_says_or_names_the_object(
    event: LocationEvent, state: OnDisk
) -> None:
    """What is not in the table is refused and changes nothing."""
    location = made(state)
    expected = TRANSITIONS[event].get(state)
    if expected is None:
        with pytest.raises(RuntimeError, match=f"{event} of value/001/v.*{state}"):
            location.apply(event)
        expected = state
    else:
        location.apply(event)
    assert location.state == expected


@pytest.mark.trains
def test_whole_steps_take_transitions_of_the_table_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In little memory: fused, in parts, with updates that wait, and with two trees."""

    class Small(Prepared):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            pool_bytes = self.plan.peaks.instruction_bytes * 5 // 4 // 4096 * 4096
            self.plan = dataclasses.replace(self.plan, pool_bytes=pool_bytes)

    monkeypatch.setattr(training, "Prepared", Small)
    seen: Counter[Transition] = Counter()
    for mode, tree in MODES.items():
        with recorded(Location, "state") as transitions:
            trained(config_of(tmp_path / mode.replace(" ", "-"), tree))
        seen += transitions
    assert {(event, before) for event, before, _ in seen} >= TAKEN
    table = {
        (e, before, after) for e, rows in TRANSITIONS.items() for before, after in rows.items()
    }
    assert set(seen) <= table
