"""What the RAM tier asks of the disk: where objects live when they are not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import ObjectKey

__all__ = ["Home", "Wait"]


class Home(Protocol):
    """Where objects live when they are not in memory."""

    def size_bytes(self, key: ObjectKey) -> int:
        """Return the bytes of the object's slab, a multiple of 4096."""

    def holds(self, key: ObjectKey) -> bool:
        """Whether a current version of the object is on the disk."""

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        """Begin to fill `slab`; the object is there when all futures are done."""

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        """Begin to spill an object; it is on the disk when all futures are done."""

    def forget(self, key: ObjectKey) -> None:
        """The object is dead: what the disk holds of it is of no use any more."""


class Wait(Protocol):
    """Waits for I/O as `concurrent.futures.wait` does."""

    def __call__(self, fs: Sequence[Future[Any]], *, return_when: str = ...) -> object:
        """Return when all are done, or the first one with FIRST_COMPLETED."""
