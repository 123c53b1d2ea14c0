"""An object in memory: its slab, the state of its content, and what the plan wants of it.

The content of a slab is in one state at a time, and only these events change it. Any other pair
of event and state is a mistake in the program, and raises RuntimeError with the object's name.

    event    from                   to
    read     absent                 reading
    make     absent                 dirty
    change   clean, dirty           dirty
    write    clean, dirty, writing  writing
    finish   reading, writing       clean
    finish   leaving                absent
    evict    clean                  absent
    free     clean, dirty           absent
    free     reading, writing       leaving

Three transitions are missing on purpose.

    evict dirty    It would lose the only copy.
    evict reading, evict writing
                   The slab would go to another object while a thread still fills or empties it.
                   A write would then put the other object's bytes under this one's name.
    change writing
                   A commit would write bytes of two versions, and take the checksum of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import ObjectKey

__all__ = ["TRANSITIONS", "Content", "Entry", "Event", "Retention"]
__all__ += ["ABSENT", "CLEAN", "DIRTY", "LEAVING", "READING", "UNDER_WAY", "WRITING"]
__all__ += ["PREFETCHED", "SPARE", "WANTED"]


class Content(StrEnum):
    """The state of what a slab contains."""

    ABSENT = "absent"
    """There is no slab, or it has been given back."""
    READING = "reading"
    """Undefined until the read is done."""
    CLEAN = "clean"
    """The disk has the same."""
    DIRTY = "dirty"
    """Memory has the only current copy."""
    WRITING = "writing"
    """A write takes the content as it is: it may be read, and must not change."""
    LEAVING = "leaving"
    """The program needs it no more, but a thread still fills or empties the slab."""


Event = Literal["read", "make", "change", "write", "finish", "evict", "free"]
"""What changes the state of a content."""


class Retention(StrEnum):
    """How long the plan wants an object in memory."""

    WANTED = "wanted"
    """Until its next use."""
    PREFETCHED = "prefetched"
    """Until its next use, for which it was read ahead as planned."""
    SPARE = "spare"
    """No longer: it is the first to give way."""


# Names of their own, since the loops over all entries are hot and an attribute of an Enum is slow.
ABSENT, READING, CLEAN, DIRTY, WRITING, LEAVING = Content
UNDER_WAY = (READING, WRITING, LEAVING)
"""States in which a thread fills or empties the slab."""
WANTED, PREFETCHED, SPARE = Retention

TRANSITIONS: Mapping[Event, Mapping[Content, Content]] = {
    "read": {ABSENT: READING},
    "make": {ABSENT: DIRTY},
    "change": {CLEAN: DIRTY, DIRTY: DIRTY},
    "write": {CLEAN: WRITING, DIRTY: WRITING, WRITING: WRITING},
    "finish": {READING: CLEAN, WRITING: CLEAN, LEAVING: ABSENT},
    "evict": {CLEAN: ABSENT},
    "free": {CLEAN: ABSENT, DIRTY: ABSENT, READING: LEAVING, WRITING: LEAVING},
}


@dataclass(slots=True)
class Entry:
    """The record of an object in memory."""

    key: ObjectKey
    slab: Slab
    content: Content = ABSENT
    io: list[Future[Any]] = field(default_factory=list)
    """Reads or writes of the slab that are not known to be done."""
    pins: int = 0
    """Instructions under way that touch it."""
    next_use: int = 0
    """The position where the program touches it next."""
    retention: Retention = WANTED

    def apply(self, event: Event) -> None:
        """Change the state of the content; RuntimeError where the table has no such transition."""
        content = TRANSITIONS[event].get(self.content)
        if content is None:
            raise RuntimeError(f"{event} of {self.key}, which is {self.content} in memory")
        self.content = content

    def start(self, event: Literal["read", "write"], futures: Iterable[Future[Any]]) -> None:
        """Note I/O that is under way: a read into the slab, or a write of its content as it is."""
        self.apply(event)
        self.io.extend(futures)

    def finish(self) -> None:
        """Note that all I/O is done; raise its first error, after which nothing has changed."""
        # A failed write raises before the content counts as clean, again at each call. Were it
        # clean first, the next call would evict the only copy of what the disk did not take.
        for future in self.io:
            future.result()
        self.apply("finish")
        self.io = []

    @property
    def done(self) -> bool:
        """Whether no I/O is under way."""
        return all(future.done() for future in self.io)
