"""SIGINT, SIGTERM and SIGHUP: the first stops where nothing is lost, the second at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from swaptrain.errors import StoppedBySignal

__all__ = ["Outlook", "StopRequest"]

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
"""Exit codes; that the terminal has gone is a request to end like any other."""
_SAME_S = 0.05
"""`timeout` sends its signal twice, to the process and to its group: that is one request."""
_SHOW_CURSOR = b"\x1b[?25h"


@dataclass(frozen=True)
class Outlook:
    """What a first signal leads to."""

    text: str
    """After what the run stops."""
    hold: bool = False
    """Whether it goes on, past the instruction in progress, until `release`."""


class _StopNow(KeyboardInterrupt):
    """Not an Exception, so that no library takes it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopRequest:
    """Listens to the signals while it is entered; does nothing outside the main thread.

    Until `doing` has been called a first signal ends the block at once: nothing is at stake. From
    then on it only makes `check_after` raise. Stopping at once is safe at any moment: that is what
    the commits are for.

    A thread reads the numbers of the signals from a pipe that the interpreter's C handler fills, so
    that a message appears, and a second signal works, also while the main thread is inside of a
    kernel that takes minutes.
    """

    def __init__(self) -> None:
        self.outlook: Callable[[], Outlook | None] = lambda: None
        """Says, on another thread, what a stop in this moment would mean."""
        self.waits_for_ranks = False
        """Whether a stop waits until all ranks of the run have agreed on it."""
        self._agreed = False
        self._doing: str | None = None
        self._requested: int | None = None
        self._hold = False
        self._taken_s = float("-inf")
        self._raised = False
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self._requested is not None

    @property
    def what(self) -> str:
        """What is in progress."""
        return self._doing or "the start"

    @property
    def number(self) -> int:
        """The signal that has come; 0 where none has."""
        return self._requested or 0

    def agree(self, number: int) -> None:
        """Take the stop that the ranks of the run have agreed on, since one of them was asked."""
        self._requested, self._hold, self._agreed = number, False, True

    def ask(self) -> None:
        """Ask for a stop as a first SIGINT does, without a word: the caller knows why."""
        self._requested = signal.SIGINT

    def doing(self, what: str) -> None:
        """Name what is in progress, such as `segment 12/40`: a stop comes after it."""
        self._doing = what

    def release(self) -> None:
        """Let a stop that was held come at the next check."""
        self._hold = False

    def check_after(self, what: str) -> None:
        """Raise StoppedBySignal, saying after what, if a signal came and is not held."""
        if self.waits_for_ranks and not self._agreed:
            return
        if self._requested is not None and not self._hold:
            raise _stopped(self._requested, f"stopped after {what}; run the same command to go on")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._writing, False)
            self._thread = threading.Thread(target=self._listen, name="swaptrain-signals")
            self._thread.daemon = True
            self._thread.start()
            self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            for number in _CODES:
                # Under nohup the terminal's end is no reason to stop.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.write(self._writing, b"\0")
            self._thread.join()
            os.close(self._reading)
            os.close(self._writing)
        if isinstance(error, _StopNow):
            raise _stopped(error.number, "stopped") from None

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Run on the main thread, between two instructions of the interpreter."""
        if self._doing is None and not self._raised:
            self._raised = True
            raise _StopNow(number)

    def _listen(self) -> None:
        while number := os.read(self._reading, 1)[0]:
            if number not in _CODES:
                continue
            now_s = time.monotonic()
            if self._requested is None:
                self._taken_s = now_s
                self._request(number)
            elif now_s - self._taken_s > _SAME_S:
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)  # which the progress line has hidden
                os._exit(_CODES[signal.Signals(number)])

    def _request(self, number: int) -> None:
        outlook = self.outlook() if self._doing is not None else Outlook("")
        if outlook is None:
            outlook = Outlook(f"after {self.what}")
        self._hold = outlook.hold
        self._requested = number
        text = f"stopping {outlook.text}".rstrip() + ", press again to stop at once\n"
        try:
            # Not sys.stderr: its buffer may be in use by the code that the signal interrupted.
            os.write(2, text.encode())
        except OSError:
            return  # the terminal, or who read the pipe, has gone: nobody is there to be told


def _stopped(number: int, text: str) -> StoppedBySignal:
    error = StoppedBySignal(number, text)
    error.exit_code = _CODES[signal.Signals(number)]
    return error
