"""What to keep in memory: next uses, the choice of a victim, and a plan of a whole program."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swaptrain.program.durability import Durability
from swaptrain.program.instructions import Instruction, Kind, ObjectKey, Program

__all__ = ["NextUse", "Residency", "Traffic", "choose_victim", "plan_residency"]
__all__ += ["planned_bytes", "victim_score"]

NEVER = 1 << 60
_LARGE = Kind.STATE, Kind.ACCUMULATOR
"""What takes as long to write as a commit; the rest is what single micro-batches spill."""
_AHEAD_PART = 10
"""The part of the budget, 1 in so many, that reads ahead of the plan may fill at the least."""


class NextUse:
    """Says when an object is needed next: the positions of a program and of those that follow."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = instructions
        self.touches = [tuple(dict.fromkeys(i.touches)) for i in instructions]
        """By position: what the instruction touches, each once."""
        self._uses: dict[ObjectKey, list[int]] = {}
        for position, keys in enumerate(self.touches):
            for key in keys:
                self._uses.setdefault(key, []).append(position)

    def after(self, key: ObjectKey, position: int) -> int:
        """Return the first position after `position` that touches `key`, or a very large one."""
        uses = self._uses.get(key, [])
        i = bisect_right(uses, position)
        return uses[i] if i < len(uses) else NEVER

    def until(self, key: ObjectKey, position: int) -> int:
        """Return the last position up to `position` that touches `key`, or -1."""
        uses = self._uses.get(key, [])
        i = bisect_right(uses, position)
        return uses[i - 1] if i else -1


def victim_score(distance: int, *, dirty: bool) -> float:
    """Rate an object for eviction: the distance of its next use over what evicting it costs.

    Belady's furthest next use, weighted: a clean object costs one transfer (read again), a dirty
    one two (written, read again).
    """
    return distance / (2 if dirty else 1)


def choose_victim(
    candidates: Iterable[tuple[ObjectKey, int, bool]], position: int
) -> ObjectKey | None:
    """Return which of (key, next use, dirty) is best evicted at `position`, None if there is none.

    Ties go to the first candidate.
    """
    best: ObjectKey | None = None
    best_score = -1.0
    for key, next_use, dirty in candidates:
        score = victim_score(next_use - position, dirty=dirty)
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


class Residency:
    """What a cache holds while a program runs, decided in advance."""

    def __init__(
        self,
        next_use: NextUse,
        held_before: Mapping[ObjectKey, bool] | None = None,
        used_bytes: Sequence[int] = (),
        reads: Sequence[Collection[ObjectKey]] = (),
        evictions: Mapping[ObjectKey, Sequence[int]] | None = None,
        held_after: Mapping[ObjectKey, bool] | None = None,
    ) -> None:
        self.next_use = next_use
        self._held_before = held_before or {}
        self.used_bytes = used_bytes
        """By position: the bytes that the plan has a use for while the instruction runs."""
        self.reads = reads
        """By position: what the plan has read for it."""
        self._reading = [position for position, keys in enumerate(reads) if keys]
        self._evictions = evictions or {}
        self.held_after = held_after or {}
        """What is held after the program, and whether it is dirty then."""

    @property
    def instructions(self) -> Sequence[Instruction]:
        """The instructions, by position."""
        return self.next_use.instructions

    @property
    def touches(self) -> Sequence[tuple[ObjectKey, ...]]:
        """By position: what is in memory while the instruction runs, each once."""
        return self.next_use.touches

    def reading(self, begin: int, end: int) -> Sequence[int]:
        """Return the positions from `begin` up to `end` that the plan has something read for."""
        first, last = bisect_left(self._reading, begin), bisect_left(self._reading, end)
        return self._reading[first:last]

    def spares(self, key: ObjectKey, position: int) -> bool:
        """Whether the plan can spare `key`: it does not keep it until its next use.

        From its last use on its bytes are free for what is fetched ahead, and if it is dirty it
        can be written: nothing is lost by doing either before the plan does.
        """
        last = self.next_use.until(key, position)
        if last < 0 and key not in self._held_before:
            return True
        evictions = self._evictions.get(key, ())
        i = bisect_right(evictions, last)
        return i < len(evictions) and evictions[i] < self.next_use.after(key, position)


@dataclass
class _Held:
    size_bytes: int
    next_use: int
    dirty: bool
    written_at: int
    """Up to this position it is being written, if it is dirty and leaves after its last use."""


class _Cache:
    """A serial cache: one instruction after the other, room is made at the last moment."""

    def __init__(
        self,
        next_use: NextUse,
        size_bytes: Callable[[ObjectKey], int],
        cache_bytes: int,
        held: Mapping[ObjectKey, bool],
        barriers: Collection[int],
    ) -> None:
        self._barriers, self._ordered_barriers = barriers, sorted(barriers)
        self._next_use, self._size_bytes, self._cache_bytes = next_use, size_bytes, cache_bytes
        self._held = {
            key: _Held(size_bytes(key), next_use.after(key, -1), dirty, self._barrier_after(-1))
            for key, dirty in held.items()
        }
        self._used = sum(entry.size_bytes for entry in self._held.values())
        self.read_bytes = self.write_bytes = self.commit_bytes = 0
        self.used_bytes: list[int] = []
        self.reads: list[set[ObjectKey]] = []
        self.evictions: dict[ObjectKey, list[int]] = {}
        self._sent: set[ObjectKey] = set()
        """What another rank has sent: it stays until it is freed."""
        self._committing: set[ObjectKey] = set()
        """What was made durable: it is being written until the next barrier."""
        self._written: dict[ObjectKey, int] = {}
        """The last position at which the write of an object was under way."""

    def held(self) -> dict[ObjectKey, bool]:
        """Return what is held, and whether it is dirty."""
        return {key: entry.dirty for key, entry in self._held.items()}

    def run(self, instruction: Instruction, position: int, durable: Iterable[ObjectKey]) -> None:
        """Bring what an instruction touches, and take note of what it changes and frees."""
        held = self._held
        pinned = self._committing.union(instruction.touches, self._sent)
        reads: set[ObjectKey] = set()
        barrier = self._barrier_after(position)
        for key in dict.fromkeys(instruction.touches):
            next_use = self._next_use.after(key, position)
            # What is not large is written beside the next instruction.
            written_at = barrier if key.kind in _LARGE else position + 1
            if key in held:
                held[key].next_use, held[key].written_at = next_use, written_at
                continue
            size = self._size_bytes(key)
            self._make_room(size, position, pinned)
            fresh = key in instruction.writes
            held[key] = _Held(size, next_use, fresh, written_at)
            self._used += size
            if not fresh:
                self.read_bytes += size
                reads.add(key)
            elif key.kind is Kind.SHARED:
                self._sent.add(key)
        self.reads.append(reads)
        self.used_bytes.append(self._used)
        for key in instruction.changes:
            held[key].dirty = True
        if instruction.part > 1:
            self._release_parts(instruction, position)
        if position in self._barriers:
            self._written.update(dict.fromkeys(self._committing, position))
            self._committing.clear()
        for key in durable:
            self._committing.add(key)
            size = self._size_bytes(key)
            self.commit_bytes += size
            self.write_bytes += size
            if key in held:
                held[key].dirty = False
        self._sent.difference_update(instruction.frees)
        for key in instruction.frees:
            if key in held and key.kind is not Kind.STATE:
                self._used -= held.pop(key).size_bytes

    def _release_parts(self, instruction: Instruction, position: int) -> None:
        """Take what the part before the last one of an update has changed as written."""
        written = [
            key
            for key in self._committing
            if key.segment == instruction.segment and 0 <= key.part < instruction.part - 1
        ]
        self._committing.difference_update(written)
        self._written.update(dict.fromkeys(written, position))

    def _barrier_after(self, position: int) -> int:
        """Return the position by which state is written whose write begins after `position`.

        As for a commit that is the next barrier.
        """
        i = bisect_right(self._ordered_barriers, position)
        return self._ordered_barriers[i] if i < len(self._ordered_barriers) else position + 1

    def _make_room(self, size_bytes: int, position: int, pinned: Container[ObjectKey]) -> None:
        """Evict until `size_bytes` fit; what is being written goes only if nothing else can."""
        while self._used + size_bytes > self._cache_bytes:
            movable = (
                (k, h.next_use, h.dirty)
                for k, h in self._held.items()
                if k not in pinned and not (h.dirty and h.written_at >= position)
            )
            victim = choose_victim(movable, position)
            if victim is None:
                every = ((k, h.next_use, h.dirty) for k, h in self._held.items() if k not in pinned)
                victim = choose_victim(every, position)
            if victim is None:
                return
            entry = self._held.pop(victim)
            self._used -= entry.size_bytes
            self.write_bytes += entry.size_bytes if entry.dirty else 0
            self.evictions.setdefault(victim, []).append(position)
            last = max(self._next_use.until(victim, position), self._written.get(victim, -1))
            if entry.dirty:
                last = max(last, entry.written_at)
            for useless in range(last + 1, position):
                self.used_bytes[useless] -= entry.size_bytes


def planned_bytes(
    program: Program, size_bytes: Callable[[ObjectKey], int], budget_bytes: int
) -> int:
    """Return the part of a pool's budget that is planned with; the rest is for reads ahead.

    A tenth where a step then reads nothing. Else the rest has room for what any instruction reads
    that the one before does not have, so that it is read while that one runs; as far as half of
    what the largest instruction leaves of the budget.
    """
    keys = {key for instruction in program for key in instruction.touches}
    sizes = {key: size_bytes(key) for key in keys}
    tenth = budget_bytes // _AHEAD_PART
    if _whole_bytes(program, sizes) <= budget_bytes - tenth:
        return budget_bytes - tenth
    most_read_bytes = most_bytes = 0
    before: set[ObjectKey] = set()
    for instruction in program:
        touched = set(instruction.touches)
        read = sum(sizes[key] for key in set(instruction.needs) - before)
        most_read_bytes = max(most_read_bytes, read)
        most_bytes = max(most_bytes, sum(sizes[key] for key in touched))
        before = touched
    return budget_bytes - max(tenth, min(most_read_bytes, (budget_bytes - most_bytes) // 2))


def _whole_bytes(program: Program, sizes: Mapping[ObjectKey, int]) -> int:
    """Return what is in memory at most where nothing leaves it before it is dead."""
    state_bytes = sum(size for key, size in sizes.items() if key.kind is Kind.STATE)
    live: set[ObjectKey] = set()
    live_bytes = most_bytes = 0
    for instruction in program:
        new = {key for key in instruction.touches if key.kind is not Kind.STATE} - live
        live |= new
        live_bytes += sum(sizes[key] for key in new)
        most_bytes = max(most_bytes, live_bytes)
        gone = live.intersection(instruction.frees)
        live -= gone
        live_bytes -= sum(sizes[key] for key in gone)
    return state_bytes + most_bytes


def plan_residency(
    program: Program,
    following: Program,
    size_bytes: Callable[[ObjectKey], int],
    cache_bytes: int,
    *,
    durability: Durability,
    held: Mapping[ObjectKey, bool],
) -> Residency:
    """Decide what a cache of `cache_bytes` holds while `program`, and then `following`, run.

    `held` is what it holds before, and whether that is dirty. The decisions are those of a cache
    that makes room at the last moment, which is what makes furthest-next-use good: one that fetches
    ahead as far as it can evicts, in a sweep that goes round, all that it will need. A commit is
    written until a position where, by `durability`, the writes before it have ended.
    """
    next_use = NextUse((*program, *following))
    cache = _Cache(next_use, size_bytes, cache_bytes, held, durability.writes_end)
    after: dict[ObjectKey, bool] = {}
    for position, instruction in enumerate(next_use.instructions):
        cache.run(instruction, position, durability.planned(position))
        if position == len(program) - 1:
            after = cache.held()
    return Residency(next_use, held, cache.used_bytes, cache.reads, cache.evictions, after)
