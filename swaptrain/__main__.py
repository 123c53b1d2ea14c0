"""`python -m swaptrain`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["command"]

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def command() -> None:
    """Run the command line of this process, and end it with the command's exit code."""
    from swaptrain.memory.malloc import restart_without_cache

    restart_without_cache()
    # Before the command listens to signals itself, and when it has ended but the interpreter has
    # not: nothing can be lost, so each of them ends the process, which says so by its exit code.
    code: int | None = None

    def end(number: int, _: FrameType | None) -> None:
        os._exit(_CODES[signal.Signals(number)] if code is None else code)

    for number in _CODES:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    from swaptrain.cli import main

    code = main()
    sys.exit(code)


if __name__ == "__main__":
    # Python puts the current directory first. Modules that a library imports must not come from
    # there: it may be a run directory of somebody else, with a `yaml.py` in it. Where the config
    # names a module of the user's, `model.python` puts the directory back.
    if sys.path and sys.path[0] in {"", os.getcwd()} and not sys.flags.safe_path:
        del sys.path[0]
    command()
