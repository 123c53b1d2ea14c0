"""What disks hold: for each place, what is seen now and what a power loss may reveal instead.

A write is seen at once and durable only after a flush. Until then a power loss leaves the old
content, the new one or a torn one, at each place independently of all others (so also: on each disk
independently, and renames as a prefix or as any subset). A place stays undecided until somebody
reads it, so that one image stands for every combination of what was lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GARBAGE", "TORN", "Cell", "Disk", "Image", "Place", "Undecided"]

Place = tuple[Hashable, ...]


class _Word:
    def __init__(self, word: str) -> None:
        self._word = word

    def __repr__(self) -> str:
        return self._word


TORN = _Word("torn")
"""What a write leaves that was cut off in the middle; no checksum is right about it."""
GARBAGE = _Word("garbage")
"""Whatever an unused place holds; nothing may depend on it."""
_UNDECIDED = _Word("undecided")


class Cell(NamedTuple):
    """One place."""

    seen: Hashable
    """What a read gives now."""
    durable: frozenset[Hashable]
    """What a power loss may leave."""
    dirty: bool = False
    """Whether a flush makes what is seen durable. A cell that is not dirty and may still lose what
    is seen has met an I/O error: the kernel has forgotten that it was ever written."""

    @property
    def certain(self) -> bool:
        return self.durable == {self.seen}


Image = tuple[Cell, ...]


class Undecided(Exception):
    """A read met a place of which a power loss left one of several contents."""

    def __init__(self, index: int) -> None:
        self.index = index


def _certain(content: Hashable) -> Cell:
    return Cell(content, frozenset((content,)))


_UNUSED = _certain(GARBAGE)


@dataclass(frozen=True)
class Disk:
    """The places of a run, in the order of an image; the operations give new images."""

    places: tuple[Place, ...]
    index: dict[Place, int]
    device: dict[Place, int]
    """The disk that a place lies on; 0 where it is not said."""

    @classmethod
    def of(cls, places: Iterable[Place], device: dict[Place, int]) -> Disk:
        ordered = tuple(places)
        return cls(ordered, {place: i for i, place in enumerate(ordered)}, device)

    def image(self, contents: dict[Place, Hashable]) -> Image:
        """Return an image in which everything is durable; what is not given is garbage."""
        return tuple(_certain(contents.get(place, GARBAGE)) for place in self.places)

    def read(self, image: Image, place: Place) -> Hashable:
        """Return what is seen; raises Undecided."""
        index = self.index[place]
        content = image[index].seen
        if content is _UNDECIDED:
            raise Undecided(index)
        return content

    def may_hold(self, image: Image, place: Place) -> frozenset[Hashable]:
        """Return what is seen and what a power loss may reveal."""
        cell = image[self.index[place]]
        if cell.seen is _UNDECIDED:
            return cell.durable
        return cell.durable | {cell.seen}

    def write(self, image: Image, place: Place, content: Hashable, *, tears: bool = True) -> Image:
        """Overwrite a place, unflushed; a rename or the end of a file is whole or not there."""
        index = self.index[place]
        old = image[index]
        lost = {content, TORN} if tears else {content}
        return _with(image, index, Cell(content, old.durable | lost, True))

    def flush(self, image: Image, places: Iterable[Place]) -> Image:
        """Make what is seen at some places durable."""
        for place in places:
            index = self.index[place]
            cell = image[index]
            if cell.dirty:
                image = _with(image, index, _certain(cell.seen))
        return image

    def flush_devices(self, image: Image, devices: Iterable[int]) -> Image:
        """Flush whole disks."""
        chosen = set(devices)
        return self.flush(image, (p for p in self.places if self.device.get(p, 0) in chosen))

    def failed(self, image: Image, place: Place) -> Image:
        """Return the image after a flush of a place failed: what was written may be lost at any
        later time, and no flush mends it."""
        index = self.index[place]
        return _with(image, index, image[index]._replace(dirty=False))

    def forget(self, image: Image, places: Iterable[Place]) -> Image:
        """Drop clean pages, so that reads give what the disk has."""
        for place in places:
            index = self.index[place]
            cell = image[index]
            if not cell.dirty and not cell.certain:
                image = _with(image, index, _revealed(cell))
        return image

    def unused(self, image: Image, places: Iterable[Place]) -> Image:
        """Return the image with garbage in places that nothing may depend on."""
        for place in places:
            image = _with(image, self.index[place], _UNUSED)
        return image

    def keep_newest(self, image: Image, places: Iterable[Place]) -> Image:
        """Return the image with garbage for all but the values of the newest step in a place."""
        for place in places:
            index = self.index[place]
            cell = image[index]
            newest = max(_step(content) for content in cell.durable | {cell.seen})

            def kept(content: Hashable, newest: int = newest) -> Hashable:
                undecided = content is _UNDECIDED
                return content if undecided or 0 < _step(content) == newest else GARBAGE

            durable = frozenset(kept(content) for content in cell.durable)
            image = _with(image, index, Cell(kept(cell.seen), durable, cell.dirty))
        return image

    @staticmethod
    def lose_power(image: Image) -> Image:
        """Leave every place undecided that was not flushed."""
        return tuple(cell if cell.certain else _revealed(cell) for cell in image)

    @staticmethod
    def decide(image: Image, index: int) -> list[Image]:
        """Return an image for each content that an undecided place may have."""
        choices = sorted(image[index].durable, key=repr)
        return [_with(image, index, _certain(content)) for content in choices]


def _step(content: Hashable) -> int:
    """Return the step of a value; 0 for everything else."""
    return content[1] if isinstance(content, tuple) and content[0] == "value" else 0


def _revealed(cell: Cell) -> Cell:
    if len(cell.durable) == 1:
        return Cell(next(iter(cell.durable)), cell.durable)
    return Cell(_UNDECIDED, cell.durable)


def _with(image: Image, index: int, cell: Cell) -> Image:
    return (*image[:index], cell, *image[index + 1 :])
