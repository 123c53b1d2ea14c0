"""A chat template is somebody else's program: limits of a process that runs it, and of a row."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from swaptrain.chat.refusal import RowError
from swaptrain.units import GIB

__all__ = ["MOST_BYTES", "allow_cpu", "begin_limits", "row_limit"]

MOST_BYTES = 4 * GIB
"""Address space of a process."""


class _LateError(BaseException):
    """A row takes too long; no `except Exception` of a template's filters holds it up."""


def begin_limits() -> None:
    """Limit the memory of this process, which does nothing else, and let rows have limits."""
    signal.signal(signal.SIGVTALRM, _late)
    _limit(resource.RLIMIT_AS, MOST_BYTES)


def allow_cpu(seconds: int) -> None:
    """End this process once it has taken so much more processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + seconds)


@contextmanager
def row_limit(seconds: float) -> Iterator[None]:
    """Let what follows take so much processor time; raises RowError for time and memory."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    except MemoryError:
        raise RowError(f"it takes more than {MOST_BYTES // GIB} GiB: is it the template?") from None
    except _LateError:
        raise RowError(f"it takes more than {seconds:g} s: does the chat template end?") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise _LateError


def _limit(which: int, most: int) -> None:
    """Set a limit of this process, or leave a lower one that it was begun with."""
    hard = resource.getrlimit(which)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (soft, hard))
