"""The hand-off: gradients that the rest of a step needs and that cannot be made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swaptrain.durable.disk_backing import DiskBacking
from swaptrain.memory.tier import Tier
from swaptrain.program.durability import Made
from swaptrain.program.instructions import Kind, ObjectKey, Program
from swaptrain.store.format.state_record import handoff_row
from swaptrain.store.slots.commit import Write

__all__ = ["HandedOn", "HandoffWriter", "largest_handoff"]


@dataclass(frozen=True)
class HandedOn:
    """The part of a hand-off that one commit writes, and what its record says of the whole."""

    in_memory: tuple[ObjectKey, ...] = ()
    """The gradients that it writes."""
    writes: tuple[Write, ...] = ()
    rows: Callable[[list[list[int]]], list[dict[str, Any]]] = lambda _: []
    """From the checksums of the writes to the rows of the record; called once the writes are done,
    on the committer's thread, in the order of the commits."""


class HandoffWriter:
    """Writes gradients that are alive, each once, and names all of them in each commit's record."""

    def __init__(self, backing: DiskBacking, tier: Tier) -> None:
        self._backing, self._tier = backing, tier
        self._checksums: dict[ObjectKey, list[int]] = {}
        """Of gradients that are durable and alive; the committer thread's."""

    def adopt(self, checksums: Mapping[ObjectKey, list[int]]) -> None:
        """Take over the hand-off that a resume found; before anything is submitted."""
        self._checksums.update(checksums)

    def take(self, made: Made) -> HandedOn:
        """Take what a commit that is submitted now has to write, and to say, of what is alive."""
        # A gradient that was spilled is on the disk, flushed, under the same name: its checksums
        # are taken over, and nothing is written twice.
        spilled = {key: self._backing.spill_checksums(key) for key in made.handed_on}
        in_memory = tuple(key for key in made.handed_on if not spilled[key])
        writes = tuple(
            self._backing.handoff_write(key, self._tier.in_memory(key)) for key in in_memory
        )
        places = {key: self._backing.saved_place(key)[1] for key in made.alive}

        def rows(sums: list[list[int]]) -> list[dict[str, Any]]:
            self._checksums.update(zip(in_memory, sums, strict=True))
            for key, futures in spilled.items():
                if futures:
                    self._checksums[key] = [future.result() for future in futures]
            for key in set(self._checksums).difference(places):
                del self._checksums[key]
            return [handoff_row(key, self._checksums[key], row) for key, row in places.items()]

        return HandedOn(in_memory, writes, rows)


def largest_handoff(program: Program) -> list[ObjectKey]:
    """Return the most gradients that are alive after any instruction of a program."""
    live: dict[ObjectKey, None] = {}
    most: list[ObjectKey] = []
    for instruction in program:
        live.update(dict.fromkeys(k for k in instruction.writes if k.kind is Kind.GRADIENT))
        for key in instruction.frees:
            live.pop(key, None)
        if len(live) > len(most):
            most = list(live)
    return most
