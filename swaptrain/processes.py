"""Processes that work for this one: they end with it, and leave Ctrl-C to it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

__all__ = ["NEEDS_GUARD", "process_pool"]

NEEDS_GUARD = (
    "A script whose own functions make the data (__main__:...) needs "
    '`if __name__ == "__main__":` around its call, since each process imports the script'
)
"""What a message says when such processes end at once."""
_WATCH_S = 1.0


def process_pool(
    processes: int,
    begin: Callable[..., None],
    *arguments: Any,
    imports_script: bool = False,
) -> ProcessPoolExecutor:
    """Return processes that begin anew (nothing is forked), each with `begin(*arguments)`.

    They import the script that runs here only where that is asked for: it would run once more.
    """
    return ProcessPoolExecutor(
        processes,
        mp_context=SpawnContext() if imports_script else _Context(),
        initializer=_begin,
        initargs=(os.getpid(), begin, arguments),
    )


class _Process(SpawnProcess):
    """Begins without the script of its parent."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # multiprocessing's name
        with _no_script():
            return SpawnProcess._Popen(process_obj)


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def _no_script() -> Iterator[None]:
    """Hide what multiprocessing has a new process import: `__main__`, by its name or its file."""
    script: dict[str, Any] = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {
        name: script[name] for name in ("__file__", "__spec__") if name in script
    }
    try:
        script.pop("__file__", None)
        script["__spec__"] = None
        yield
    finally:
        script.update(hidden)


def _begin(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it, and ends this process
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    begin(*arguments)


def _end_with(parent: int) -> None:
    """End this process when its parent has been killed, which nothing else tells it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)
