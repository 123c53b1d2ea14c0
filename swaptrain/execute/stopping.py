"""SIGINT and SIGTERM: the first stops after the instruction in progress, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from swaptrain.errors import StoppedBySignal
from swaptrain.program.instructions import Instruction

__all__ = ["StopRequest"]


class StopRequest:
    """Listens to the two signals while it is entered; does nothing outside the main thread.

    Stopping at once is safe at any moment: that is what the commits are for.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._requested: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self, instruction: Instruction, segments: int) -> None:
        """Raise StoppedBySignal after an instruction if a signal came."""
        self.check_after(f"{instruction.operation} of segment {instruction.segment}/{segments}")

    def check_after(self, what: str) -> None:
        """Raise StoppedBySignal, saying after what, if a signal came."""
        if self._requested is not None:
            raise StoppedBySignal(
                self._requested, f"stopped after {what}; run the same command to go on"
            )

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._requested is not None:
            os._exit(128 + number)
        self._requested = number
        # Not sys.stderr: its buffer may be in use by the code that the signal interrupted.
        os.write(2, b"stopping after the instruction in progress, press again to stop at once\n")
