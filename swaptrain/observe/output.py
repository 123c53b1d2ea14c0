"""What is written for a person to read may fail to be written; nothing else depends on it."""

from __future__ import annotations

import os
import sys
from typing import IO

__all__ = ["open_standard_streams", "silence"]


def silence(stream: IO[str]) -> None:
    """Let a stream that has failed go nowhere, what it still holds included.

    Else the interpreter would find out about the failure once more when it flushes at its end.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_standard_streams() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed.

    Otherwise the next file that is opened gets the number, and a message into a file of the store.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "r" if number == 0 else "w", closefd=False)
            setattr(sys, name, stream)
