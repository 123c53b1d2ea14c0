"""The record of an object on the disk: where its current version lies, and what it is there for.

An object is in one state at a time, and only these events change it. Any other pair of event and
state is a mistake in the program, and raises RuntimeError with the object's name.

    event    from                                        to
    spill    absent, spilled, live, finished, retained   spilled
    finish   absent, spilled, live, finished, retained   finished
    begin    live                                        begun
    commit   live, begun, spilled, finished              live
    switch   live, spilled                               live
    free     absent, spilled                             absent
    free     finished, retained                          retained
    revert   spilled, finished                           live

State of segments begins as live, everything else as absent. Three transitions are missing on
purpose.

    free live, free begun
                  The disk would have no version of the state.
    spill begun, finish begun
                  The part that is written into the next slot would be lost for its commit, whose
                  record would then verify old bytes.
    switch finished
                  What lies with a finished gradient is no part of a tree: the store would go on
                  with buffers of another step.
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
__all__ += ["ABSENT", "BEGUN", "FINISHED", "LIVE", "RETAINED", "SPILLED"]


class OnDisk(StrEnum):
    """The state of an object on the disk."""

    ABSENT = "absent"
    """The disk has no version that the program needs."""
    SPILLED = "spilled"
    """It lies in its own place in RUN/spill, or in its segment's slot of the tree not live."""
    FINISHED = "finished"
    """It lies with the record of a finished gradient. Recovery needs it until the commit of the
    update that takes it is durable."""
    RETAINED = "retained"
    """It lies there, and the program needs it no more; recovery may, as before. An object that the
    program has made anew under that name is in memory only."""
    BEGUN = "begun"
    """A part of an array, in the slot of an update of which other parts are not done."""
    LIVE = "live"
    """It lies in the slot of its segment's newest version, whose commit may be under way."""


ABSENT, SPILLED, FINISHED, RETAINED, BEGUN, LIVE = OnDisk

LocationEvent = Literal["spill", "finish", "begin", "commit", "switch", "free", "revert"]
"""What changes the state of an object on the disk."""

TRANSITIONS: Mapping[LocationEvent, Mapping[OnDisk, OnDisk]] = {
    "spill": dict.fromkeys((ABSENT, SPILLED, LIVE, FINISHED, RETAINED), SPILLED),
    "finish": dict.fromkeys((ABSENT, SPILLED, LIVE, FINISHED, RETAINED), FINISHED),
    "begin": {LIVE: BEGUN},
    "commit": dict.fromkeys((LIVE, BEGUN, SPILLED, FINISHED), LIVE),
    "switch": dict.fromkeys((LIVE, SPILLED), LIVE),
    "free": {ABSENT: ABSENT, SPILLED: ABSENT, FINISHED: RETAINED, RETAINED: RETAINED},
    "revert": dict.fromkeys((SPILLED, FINISHED), LIVE),
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
        return self.state in (FINISHED, RETAINED)
