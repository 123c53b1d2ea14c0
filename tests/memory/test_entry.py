"""The states of an object in memory: the table holds, and nothing outside it happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from swaptrain.memory import entry as module
from swaptrain.memory.entry import TRANSITIONS, UNDER_WAY, Content, Entry, Event
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import PAGE_BYTES
from swaptrain.planning.simulation import Rehearsal, Room
from swaptrain.program.cost import Disk
from swaptrain.program.durability import Durability
from swaptrain.program.instructions import ObjectKey
from tests.program.models import chain, chain_size, size_of
from tests.support.late_backing import VALUES, one, tier_of, waits_complete
from tests.support.transition_table import Transition, documented, recorded

LENGTH = 6
KEY = VALUES[0]


def made(content: Content = Content.ABSENT) -> Entry:
    return Entry(KEY, PagePool(PAGE_BYTES).take(PAGE_BYTES), content)


def test_the_docstring_shows_the_table() -> None:
    """The table that is read is the table that is applied."""
    assert documented(module.__doc__) == TRANSITIONS


@pytest.mark.parametrize("content", Content)
@pytest.mark.parametrize("event", TRANSITIONS)
def test_an_event_does_as_the_table_says_or_names_the_object(
    event: Event, content: Content
) -> None:
    """What is not in the table is refused and changes nothing."""
    entry = made(content)
    expected = TRANSITIONS[event].get(content)
    if expected is None:
        with pytest.raises(RuntimeError, match=f"{event} of value/001/v.*{content}"):
            entry.apply(event)
        expected = content
    else:
        entry.apply(event)
    assert entry.content is expected


def test_no_sequence_of_events_loses_what_only_memory_has() -> None:
    """Over all short sequences: what is evicted has been read, or written since it changed.

    And no slab is given back during I/O.
    """
    evicted = 0
    for events in legal_sequences(made().content, LENGTH):
        entry, on_disk = made(), False
        for event in events:
            before = entry.content
            entry.apply(event)
            if event in ("make", "change"):
                on_disk = False
            elif event == "finish":
                on_disk = True
            if entry.content is Content.ABSENT:
                assert event == "free" or before is Content.LEAVING or on_disk, events
                assert event == "finish" or before not in UNDER_WAY, events
            evicted += event == "evict"
    assert evicted > 0


def legal_sequences(content: Content, length: int) -> Iterator[tuple[Event, ...]]:
    """Yield every sequence of that many events, from a state, that the table allows."""
    if not length:
        yield ()
        return
    for event, transitions in TRANSITIONS.items():
        if content in transitions:
            for rest in legal_sequences(transitions[content], length - 1):
                yield event, *rest


def test_whole_steps_take_every_transition_of_the_table_and_no_other() -> None:
    """In little memory, under a disk that is slower than the processor."""
    seen: Counter[Transition] = Counter()
    for deferred, keeps, room in product((False, True), (False, True), (1.05, 1.3, 2.5)):
        seen += transitions_of_steps(deferred=deferred, keeps_activations=keeps, room=room)
    table = {
        (e, before, after) for e, rows in TRANSITIONS.items() for before, after in rows.items()
    }
    # No program frees what it has not used. A resume does, before its first instruction.
    assert set(seen) == table - {("free", Content.READING, Content.LEAVING)}


def transitions_of_steps(
    *, deferred: bool, keeps_activations: bool, room: float
) -> Counter[Transition]:
    """Rehearse three steps of a chain, in `room` times what its largest instruction touches."""
    segments = 6
    builder = replace(chain(segments, 3), deferred=deferred)
    program = builder.step(pending_updates=range(1, segments + 1) if deferred else ())
    size = partial(size_of, chain_size(1 << 16, 1 << 16))
    most = max(sum(size(key) for key in set(i.touches)) for i in program)
    rehearsal = Rehearsal(
        size, Room(int(most * room)), seconds=lambda _: 1e-4, disk=Disk(1e8, 1e8, 1e8)
    )
    durability = Durability(program, program, keeps_activations=keeps_activations)
    with recorded(Entry, "content") as seen:
        for _ in range(3):
            rehearsal.run(program, program, durability)
    return seen


def test_io_is_noted_exactly_while_a_slab_is_read_or_written() -> None:
    """A failed write leaves the state as it was, and raises again."""
    entry = made(Content.DIRTY)
    done: Future[Any] = Future()
    entry.start("write", [done])
    assert entry.content is Content.WRITING and not entry.done
    done.set_exception(OSError("disk full"))
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            entry.finish()
        assert entry.content is Content.WRITING and entry.io == [done]
    entry.io[0] = Future()
    entry.io[0].set_result(None)
    entry.finish()
    assert entry.content is Content.CLEAN and not entry.io


def test_what_a_read_brings_cannot_be_committed_before_it_is_there() -> None:
    """The commit would write undefined bytes under the object's name."""
    tier, backing, _ = tier_of(4)
    key: ObjectKey = next(iter(backing.contents))
    tier.follow((one(), one(reads=(key,))))
    tier.prefetch(0)
    with pytest.raises(RuntimeError, match="write of state/001/weights, which is reading"):
        tier.saving([key], Future())
    with waits_complete(backing):
        tier.drain()
    tier.saving([key])
