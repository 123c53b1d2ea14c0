"""The record of an object on the disk: where its current version lies, and what it is there for.

An object is in one state at a time, and only these events change it. Any other pair of event and
state is a mistake in the program, and raises RuntimeError with the object's name.

    event    from                                    to
    spill    absent, spilled, live, kept, retained   spilled
    keep     absent, spilled, live, kept, retained   kept
    begin    live                                    begun
    commit   live, begun, spilled, kept              live
    switch   live, spilled                           live
    free     absent, spilled                         absent
    free     kept, retained                          retained
    revert   spilled, kept                           live

State of segments begins as live, everything else as absent. Three transitions are missing on
purpose.

    free live, free begun
                  The disk would have no version of the state.
    spill begun, keep begun
                  The part that is written into the next slot would be lost for its commit, whose
                  record would then verify old bytes.
    switch kept   What is kept is no part of a tree: the store would go on with buffers of another
                  step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from swaptrain.program.instructions import ObjectKey
from swaptrain.store.slots.array_files import ArrayFiles, Place

__all__ = ["TRANSITIONS", "Location", "LocationEvent", "OnDisk"]
__all__ += ["ABSENT", "BEGUN", "KEPT", "LIVE", "RETAINED", "SPILLED"]


class OnDisk(StrEnum):
    """The state of an object on the disk."""

    ABSENT = "absent"
    """The disk has no version that the program needs."""
    SPILLED = "spilled"
    """It lies in its own place in RUN/spill, or in its segment's slot of the tree not live."""
    KEPT = "kept"
    """It lies with the record of a finished gradient. Recovery needs it until the commit of the
    update that takes it is durable."""
    RETAINED = "retained"
    """It was kept, and the program needs it no more; recovery may, as before. An object that the
    program has made anew under that name is in memory only."""
    BEGUN = "begun"
    """A part of an array, in the slot of an update of which other parts are not done."""
    LIVE = "live"
    """It lies in the slot of its segment's newest version, whose commit may be under way."""


ABSENT, SPILLED, KEPT, RETAINED, BEGUN, LIVE = OnDisk

LocationEvent = Literal["spill", "keep", "begin", "commit", "switch", "free", "revert"]
"""What changes the state of an object on the disk."""

TRANSITIONS: Mapping[LocationEvent, Mapping[OnDisk, OnDisk]] = {
    "spill": dict.fromkeys((ABSENT, SPILLED, LIVE, KEPT, RETAINED), SPILLED),
    "keep": dict.fromkeys((ABSENT, SPILLED, LIVE, KEPT, RETAINED), KEPT),
    "begin": {LIVE: BEGUN},
    "commit": dict.fromkeys((LIVE, BEGUN, SPILLED, KEPT), LIVE),
    "switch": dict.fromkeys((LIVE, SPILLED), LIVE),
    "free": {ABSENT: ABSENT, SPILLED: ABSENT, KEPT: RETAINED, RETAINED: RETAINED},
    "revert": dict.fromkeys((SPILLED, KEPT), LIVE),
}


@dataclass(slots=True)
class Location:
    """Where an object's current version lies on the disk."""

    key: ObjectKey
    files: ArrayFiles
    row: int | None
    state: OnDisk
    checksums: Sequence[int] | Sequence[Future[int]] | None = None
    """Of each chunk file: what the next read is compared with, or to verify always every read."""
    writing: Sequence[Future[Any]] = ()
    """Writes into the place that may be under way, but for those of commits."""

    def apply(self, event: LocationEvent) -> None:
        """Change the state; RuntimeError where the table has no such transition."""
        state = TRANSITIONS[event].get(self.state)
        if state is None:
            raise RuntimeError(f"{event} of {self.key}, which is {self.state} on the disk")
        self.state = state

    @property
    def place(self) -> Place:
        """What tells the place of the object from others."""
        return self.files.place(self.row)

    @property
    def recovery_needs(self) -> bool:
        """Whether recovery may need what lies there until all commits submitted are durable."""
        return self.state in (KEPT, RETAINED)
