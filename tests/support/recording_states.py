"""Which states a disk may show at a moment, and how one of them is put into real directories."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support.recording_disk import Blobs, Disk, Item, Pending, State

__all__ = ["Shelf", "choices"]

_EXHAUSTIVE = 96
"""With so few combinations every one is taken."""

Choice = dict[int, str]


def choices(disk: Disk, rng: random.Random, *, newest: bool, width: int) -> Iterator[Choice]:
    """Yield which unflushed changes reach the disk, and in what part.

    All combinations where they are few. Else all and none, each one alone, missing and torn (at
    most `width` of them), names lost from some moment on, and `width` random combinations. With
    `newest` only what the last change adds: without it the states are those of the moment before.
    """
    pending = list(disk.pending.values())
    if not pending:
        yield {}
        return
    combinations = 1
    for change in pending:
        combinations *= 1 + len(change.variants)
        if combinations > _EXHAUSTIVE:
            break
    if combinations <= _EXHAUSTIVE:
        options = [(None, *change.variants) for change in pending]
        for picked in itertools.product(*options):
            yield {c.number: v for c, v in zip(pending, picked, strict=True) if v is not None}
        return
    everything = {change.number: "all" for change in pending}
    singles = pending[-1:] if newest else _some(pending, rng, width)
    yield everything
    yield {}
    for change in singles:
        for variant in change.variants:
            yield {change.number: variant}
            yield {**everything, change.number: variant}
        yield {n: v for n, v in everything.items() if n != change.number}
    if newest:
        last = pending[-1].number
        for change in _some(pending[:-1], rng, width // 4):
            yield {n: v for n, v in everything.items() if n != change.number}
            yield {change.number: "all", last: "all"}
    yield from _random(pending, rng, width // 4 if newest else width)


def _some(pending: list[Pending], rng: random.Random, count: int) -> list[Pending]:
    return pending if len(pending) <= count else rng.sample(pending, count)


def _random(pending: list[Pending], rng: random.Random, count: int) -> Iterator[Choice]:
    """Yield random combinations: of names any, or those up to a moment; of data any, all, none."""
    for _ in range(count):
        moment = rng.randrange(len(pending) + 1)
        ordered, often = rng.random() < 0.5, rng.choice([0.1, 0.5, 0.9, 1.0, 0.0])
        choice = {}
        for place, change in enumerate(pending):
            if change.kind == "names" and ordered:
                kept = place < moment
            else:
                kept = rng.random() < (often if change.kind != "names" else 0.5)
            if kept:
                choice[change.number] = rng.choice(change.variants)
        yield choice


class Shelf:
    """Real directories that show one state after the other; only what differs is touched."""

    def __init__(self, roots: list[Path], blobs: Blobs) -> None:
        self._roots, self._blobs = [Path(os.path.realpath(root)) for root in roots], blobs
        self._shown: State = {}
        self.clear()

    def clear(self) -> None:
        """Empty the directories, whatever was done to them."""
        for root in self._roots:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
        self._shown = {}

    def touched(self, path: Path) -> None:
        """Take note that a file was changed by somebody else, or made."""
        real = os.path.realpath(path)
        if real in self._shown or os.path.lexists(real):
            self._shown[real] = ("file", "unknown")

    def show(self, state: State) -> None:
        """Make the directories hold exactly this."""
        shown = self._shown
        gone = [path for path, item in shown.items() if _clash(item, state.get(path))]
        for path in sorted(gone, reverse=True):
            item = shown.pop(path)
            if item[0] == "directory":
                os.rmdir(path)
            else:
                os.unlink(path)
        for path in sorted(state):
            item = state[path]
            if shown.get(path) != item:
                self._put(path, item)
                shown[path] = item

    def _put(self, path: str, item: Item) -> None:
        kind, what = item
        if kind == "directory":
            os.mkdir(path)
        elif kind == "symlink":
            os.symlink(what, path)
        else:
            with open(path, "wb", buffering=0) as file:
                file.write(self._blobs[what])


def _clash(item: Item, wanted: Item | None) -> bool:
    """Whether something has to go before what is wanted can be put in its place."""
    return wanted is None or wanted[0] != item[0] or (item[0] == "symlink" and wanted != item)
