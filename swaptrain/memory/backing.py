"""The protocol between the RAM tier and the storage behind it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from swaptrain.memory.slab import Slab
from swaptrain.program.instructions import ObjectKey

__all__ = ["Backing", "Wait"]


class Backing(Protocol):
    """Holds the objects that are not in memory."""

    def size_bytes(self, key: ObjectKey) -> int:
        """Return the bytes of the object's slab, a multiple of 4096."""

    def holds(self, key: ObjectKey) -> bool:
        """Whether a current version of the object is on the disk."""

    def read(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        """Begin to fill `slab`; the object is in it when all futures are done."""

    def write(self, key: ObjectKey, slab: Slab) -> Sequence[Future[Any]]:
        """Begin to spill an object; it is on the disk when all futures are done."""

    def forget(self, key: ObjectKey) -> None:
        """Let an object go: the program needs its content no more."""


class Wait(Protocol):
    """Waits for I/O as `concurrent.futures.wait` does."""

    def __call__(self, fs: Sequence[Future[Any]], *, return_when: str = ...) -> object:
        """Return when all are done, or the first one with FIRST_COMPLETED."""
