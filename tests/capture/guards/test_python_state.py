"""Where Python keeps state that a forward changes: each place is seen, whatever it is made of."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import decimal
import enum
import io
import itertools
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swaptrain.capture.guards.python_state import changes, reachable
from swaptrain.errors import CaptureError
from tests.capture.guards.members import Base, batches
from tests.capture.in_memory import captured_model

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


class Settings:
    """A class that is no module's, with one inside."""

    calls = 0

    class Inner:
        calls = 0


class Counted(type):
    """A class of classes."""

    calls = 0


class Kind(enum.Enum):
    ONE = 1


class Named(list[int]):
    """A list with an attribute."""

    calls = 0


class _Holder:
    """An object of the model's, which holds what changes."""

    def __init__(self, held: Any) -> None:
        self.held = held


def _on_a_class(owner: Any) -> tuple[Any, Callable[[], object]]:
    def change() -> None:
        owner.calls = getattr(owner, "calls", 0) + 1

    return owner, change


def _next(held: Iterator[Any]) -> tuple[Any, Callable[[], object]]:
    return held, lambda: next(held)


def _local_class() -> Any:
    class Local:
        calls = 0

    return Local


def _thread_local() -> tuple[Any, Callable[[], object]]:
    held = threading.local()
    held.calls = 0
    return _on_a_class(held)


def _in_place(held: Any, change: Callable[[Any], object]) -> tuple[Any, Callable[[], object]]:
    return held, lambda: change(held)


def _setitem(held: Any) -> tuple[Any, Callable[[], object]]:
    return held, lambda: held.__setitem__(0, held[0] + 1)


def _value(held: Any) -> tuple[Any, Callable[[], object]]:
    def change() -> None:
        held.value += 1

    return held, change


PLACES: dict[str, Callable[[], tuple[Any, Callable[[], object]]]] = {
    "a class": lambda: _on_a_class(_local_class()),
    "a class in containers": lambda: (lambda held: ({"k": [held]}, _on_a_class(held)[1]))(
        _local_class()
    ),
    "the class of a class": lambda: (Counted("C", (), {}), _on_a_class(Counted)[1]),
    "the class of an object": lambda: (Settings(), _on_a_class(Settings)[1]),
    "a member of an enumeration": lambda: _on_a_class(Kind.ONE),
    "an attribute of a list": lambda: _on_a_class(Named()),
    "an attribute of a tensor": lambda: _on_a_class(torch.zeros(1)),
    "a thread's own": _thread_local,
    "a context variable": lambda: (VARIABLE, lambda: VARIABLE.set(VARIABLE.get() + 1)),
    "a cycle": lambda: _next(itertools.cycle([0, 0, 0])),
    "an enumeration": lambda: _next(enumerate(itertools.repeat(1))),
    "a zip": lambda: _next(zip(range(9), range(9), strict=True)),
    "a map": lambda: _next(map(abs, range(9))),
    "a filter": lambda: _next(filter(None, itertools.count(1))),
    "a chain": lambda: _next(itertools.chain(range(9), itertools.repeat(1))),
    "sums": lambda: _next(itertools.accumulate(itertools.repeat(1))),
    "a call until": lambda: _next(iter(iter(range(9)).__next__, 8)),
    "a method of an iterator": lambda: (lambda held: (held.__next__, held.__next__))(
        iter([0, 0, 0])
    ),
    "a number of C": lambda: _value(ctypes.c_int(0)),
    "shared memory": lambda: _value(multiprocessing.Value("i", 0)),
    "an array": lambda: _setitem(array.array("i", [0])),
    "a view of memory": lambda: _setitem(memoryview(bytearray(4))),
    "a text in memory": lambda: _in_place(io.StringIO(), lambda held: held.write("x")),
    "a queue": lambda: _in_place(queue.SimpleQueue(), lambda held: held.put(1)),
    "one of several keys": lambda: _in_place(
        {(1, 2): 0, (3, 4): 0, (5, 6): 0}, lambda held: held.__setitem__((1, 2), 1)
    ),
    "a deque": lambda: _in_place(collections.deque([0, 0, 1]), lambda held: held.rotate(-1)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_seen_and_nothing_else(place: str) -> None:
    """Looking twice finds no change; the change is found at what holds it."""
    held, change = PLACES[place]()
    roots = {"self": _Holder(held)}
    before = reachable(roots)
    assert changes(before, reachable(roots)) == {}
    change()
    assert changes(before, reachable(roots))


def test_another_value_of_an_attribute_is_seen() -> None:
    """Values that show nothing inside, and an object that another path leads to as well."""
    holder = _Holder(decimal.Decimal(1))
    for other in (decimal.Decimal(2), timedelta(1), timedelta(2), Kind.ONE):
        before = reachable({"self": holder})
        holder.held = other
        assert changes(before, reachable({"self": holder}))
    pair = (_Holder(0.5), _Holder(0.5))
    both = {"pair": pair, "self": holder}
    holder.held = pair[0]
    before = reachable(both)
    holder.held = pair[1]
    assert "self.held" in changes(before, reachable(both))


def test_the_place_in_a_file_that_is_read_is_seen(tmp_path: Path) -> None:
    """A file that is written, such as a log, is not looked at."""
    (tmp_path / "read").write_text("a\nb\n")
    with (tmp_path / "read").open() as read, (tmp_path / "log").open("w") as log:
        before = reachable({"self": _Holder([read, log])})
        log.write("x")
        assert changes(before, reachable({"self": _Holder([read, log])})) == {}
        read.readline()
        assert changes(before, reachable({"self": _Holder([read, log])}))


class OnAnotherClass(Base):
    def middle(self, h: Tensor) -> Tensor:
        Settings.Inner.calls += 1
        return h * 0.5 if Settings.Inner.calls > 9 else h


class InACycle(Base):
    def prepare(self) -> None:
        self.scales = itertools.cycle([1.0, 1.0, 1.0, 1.0, 0.5])

    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.scales)


class OnAWeight(Base):
    def middle(self, h: Tensor) -> Tensor:
        weight: Any = self.a.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return h * 0.5 if weight.calls > 9 else h


class InTheEnvironment(Base):
    def middle(self, h: Tensor) -> Tensor:
        calls = int(os.environ.get("SWAPTRAIN_TEST_CALLS", "0")) + 1
        os.environ["SWAPTRAIN_TEST_CALLS"] = str(calls)
        return h * 0.5 if calls > 9 else h


@pytest.mark.parametrize(
    ("member", "path"),
    [
        (OnAnotherClass, r"test_python_state\.Settings\.Inner\.calls"),
        (InACycle, r"self\.scales"),
        (OnAWeight, r"self\.a\.weight\.calls"),
        (InTheEnvironment, r"os\.environ\['SWAPTRAIN_TEST_CALLS'\]"),
    ],
)
def test_a_forward_that_matters_only_later_is_refused(
    member: type[Base], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first forwards compute the same, so that comparing numbers shows nothing."""
    monkeypatch.delenv("SWAPTRAIN_TEST_CALLS", raising=False)
    monkeypatch.setattr(Settings.Inner, "calls", 0)
    with pytest.raises(CaptureError, match=f"the forward changes Python state: .*{path}"):
        captured_model(member, batches()[0], tmp_path)
