"""What is written for a person to read may fail to be written; nothing else depends on it."""

from __future__ import annotations

import os
from typing import IO

__all__ = ["silence"]


def silence(stream: IO[str]) -> None:
    """Let a stream that has failed go nowhere, what it still holds included.

    Else the interpreter would find out about the failure once more when it flushes at its end.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
