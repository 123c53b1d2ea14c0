"""Processes that work for this one: they end with it, and leave Ctrl-C to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

__all__ = ["NEEDS_GUARD", "process_pool"]

NEEDS_GUARD = (
    'A script that calls swaptrain needs `if __name__ == "__main__":` around its call, since each '
    "process imports the script"
)
"""What a message says when such processes end at once."""
_WATCH_S = 1.0


def process_pool(
    processes: int, begin: Callable[..., None], *arguments: Any
) -> ProcessPoolExecutor:
    """Return processes that begin anew (nothing is forked), each with `begin(*arguments)`."""
    return ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), begin, arguments),
    )


def _begin(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it, and ends this process
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    begin(*arguments)


def _end_with(parent: int) -> None:
    """End this process when its parent has been killed, which nothing else tells it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
