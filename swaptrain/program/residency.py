"""What to keep in memory: next uses, the choice of a victim, and a simulation of the traffic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Program

__all__ = ["NextUse", "Traffic", "choose_victim", "simulate", "victim_score"]

NEVER = 1 << 60


class NextUse:
    """Says when an object is needed next: the positions of a program and of those that follow."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        self._uses: dict[ObjectKey, list[int]] = {}
        for position, instruction in enumerate(instructions):
            for key in dict.fromkeys(instruction.touches):
                self._uses.setdefault(key, []).append(position)

    def after(self, key: ObjectKey, position: int) -> int:
        """Return the first position after `position` that touches `key`, or a very large one."""
        uses = self._uses.get(key, [])
        i = bisect_right(uses, position)
        return uses[i] if i < len(uses) else NEVER


def victim_score(distance: int, *, dirty: bool) -> float:
    """Rate an object for eviction: the distance of its next use over what evicting it costs.

    Belady's furthest next use, weighted: a clean object costs one transfer (read again), a dirty
    one two (written, read again).
    """
    return distance / (2 if dirty else 1)


def choose_victim(
    candidates: Iterable[tuple[ObjectKey, bool]], next_use: NextUse, position: int
) -> ObjectKey | None:
    """Return the (key, dirty) candidate that is best evicted at `position`, None if there is none.

    Ties go to the first candidate.
    """
    best: ObjectKey | None = None
    best_score = -1.0
    for key, dirty in candidates:
        score = victim_score(next_use.after(key, position) - position, dirty=dirty)
        if score > best_score:
            best, best_score = key, score
    return best


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step moves between RAM and disk."""

    read_bytes: int
    write_bytes: int
    commit_bytes: int
    """Of the written bytes: state, hand-offs and spilled gradients that commits make durable."""

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes


@dataclass
class _Held:
    size_bytes: int
    dirty: bool


def simulate(
    program: Program,
    size_bytes: Callable[[ObjectKey], int],
    pool_bytes: int,
    *,
    durable: Callable[[Instruction], Iterable[ObjectKey]],
    rounds: int = 2,
) -> Traffic:
    """Run a step's residency in a pool of `pool_bytes` without moving anything.

    Serial: one instruction after the other, with the executor's own choice of victims. `durable`
    names what an instruction makes durable (written whether or not it stays in memory). Returns
    the traffic of the last of `rounds` equal steps, so that the cache is warm.
    """
    instructions = program * (rounds + 1)
    next_use = NextUse(instructions)
    held: dict[ObjectKey, _Held] = {}
    used = 0
    traffic = Traffic(0, 0, 0)
    for round_ in range(rounds):
        read = write = commit = 0
        for offset, instruction in enumerate(program):
            position = round_ * len(program) + offset
            pinned = set(instruction.touches)
            for key in dict.fromkeys(instruction.touches):
                if key in held:
                    continue
                size = size_bytes(key)
                while used + size > pool_bytes:
                    victim = choose_victim(
                        ((k, h.dirty) for k, h in held.items() if k not in pinned),
                        next_use,
                        position,
                    )
                    if victim is None:
                        break
                    entry = held.pop(victim)
                    used -= entry.size_bytes
                    write += entry.size_bytes if entry.dirty else 0
                fresh = key in instruction.writes
                held[key] = _Held(size, dirty=fresh)
                used += size
                read += 0 if fresh else size
            for key in instruction.changes:
                held[key].dirty = True
            for key in durable(instruction):
                commit += size_bytes(key)
                write += size_bytes(key)
                if key in held:
                    held[key].dirty = False
            for key in instruction.frees:
                if key in held and key.kind is not Kind.STATE:
                    used -= held.pop(key).size_bytes
        traffic = Traffic(read, write, commit)
    return traffic
