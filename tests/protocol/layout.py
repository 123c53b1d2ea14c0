"""What lies on the disks of a small run."""

from __future__ import annotations

from typing import Any

from tests.protocol.disk import Disk, Place
from tests.protocol.places import Places
from tests.protocol.rules import ALL_RULES
from tests.protocol.run import METRICS, ROOT, STORE, Scenario

__all__ = ["disk_of", "empty", "is_name"]


def is_name(place: Place) -> bool:
    """Whether a place is a name in a directory."""
    return place[0] == "live" or place in (ROOT, STORE) or place[-1] == "root"


def empty(scenario: Scenario) -> dict[Place, Any]:
    """Return what is on the disk before anything was created."""
    contents: dict[Place, Any] = {METRICS: 0, ROOT: None, STORE: None}
    contents.update({("live", k): None for k in scenario.stored})
    return contents


def disk_of(scenario: Scenario) -> Disk:
    """Return the disks of a scenario; slots lie on them in turn."""
    device: dict[Place, int] = {}
    places: list[Place] = [METRICS]
    if scenario.is_whole:
        places.append(STORE)
        for tree in "ab":
            places.append(("tree", tree, "root"))
            for k in scenario.stored:
                places += [("tree", tree, k, "chunks"), ("tree", tree, k, "record")]
    else:
        places.append(ROOT)
        places += [("live", k) for k in scenario.stored]
        slots = [slot for names in scenario.slots().values() for slot in names]
        for number, slot in enumerate(slots):
            for part in ("chunks", "record"):
                places.append(("slot", slot, part))
                device["slot", slot, part] = number % scenario.disks
    places += Places(scenario, ALL_RULES).all()
    return Disk.of(places, device)
