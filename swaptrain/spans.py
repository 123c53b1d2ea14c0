"""What ran when, and on which thread: recorded while somebody wants to know."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

__all__ = ["Recorder", "Span", "mark", "span", "spanned"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Span(NamedTuple):
    """Something that took time."""

    name: str
    thread: str
    begin_ns: int
    """Of `time.perf_counter_ns`, like `end_ns`."""
    end_ns: int
    about: object
    """What it was done with, to be shown as text; None where the name says it all."""
    nbytes: int
    """Bytes that it moved, or 0."""


class Recorder:
    """Collects the spans of all threads, from its making until `close`.

    A process has one at a time (RuntimeError for a second one): what is recorded says of itself
    that it runs, and knows nobody to say it to.
    """

    _current: Recorder | None = None

    def __init__(self) -> None:
        if Recorder._current is not None:
            raise RuntimeError("spans are being recorded already")
        self._spans: deque[Span] = deque()
        Recorder._current = self

    def __len__(self) -> int:
        """Return how many spans wait for `take`."""
        return len(self._spans)

    def take(self) -> list[Span]:
        """Return what was recorded since the last call, in the order in which it ended."""
        # One by one: other threads append meanwhile.
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def close(self) -> None:
        """Record no more; once is enough, more does no harm."""
        if Recorder._current is self:
            Recorder._current = None

    def add(self, span: Span) -> None:
        """Take note of a span that has ended."""
        self._spans.append(span)


class _Running:
    """A span under way."""

    __slots__ = ("_about", "_begin_ns", "_name", "_nbytes", "_recorder")

    def __init__(self, recorder: Recorder, name: str, about: object, nbytes: int) -> None:
        self._recorder, self._name = recorder, name
        self._about, self._nbytes = about, nbytes

    def __enter__(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        end_ns = time.perf_counter_ns()
        thread = threading.current_thread().name
        self._recorder.add(
            Span(self._name, thread, self._begin_ns, end_ns, self._about, self._nbytes)
        )


class _Nothing:
    """A span that nobody wants to know of."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


_NOTHING = _Nothing()


def span(name: str, about: object = None, nbytes: int = 0) -> _Running | _Nothing:
    """Return a context manager: what runs inside is a span, if spans are recorded."""
    recorder = Recorder._current
    return _NOTHING if recorder is None else _Running(recorder, name, about, nbytes)


def mark(name: str, about: object, nbytes: int = 0) -> None:
    """Note that something happened, if spans are recorded: as a span that took no time."""
    if (recorder := Recorder._current) is not None:
        now_ns = time.perf_counter_ns()
        thread = threading.current_thread().name
        recorder.add(Span(name, thread, now_ns, now_ns, about, nbytes))


def spanned(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator: each call of the function is a span."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate
