"""One process for all runs that are forked: it imports once, and never starts a thread.

`python -m tests.support.serving` reads JSON plans from its standard input, a line each, and answers
each with a line. A plan names a module, and with `do` one of the module's ACTIONS, which makes the
report of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from typing import Any

import torch

__all__ = ["Server"]


class Server:
    """The process, seen from the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.serving"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, module: str, **plan: Any) -> dict[str, Any]:
        """Return the report of a plan."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"module": module, **plan}) + "\n")
        self._process.stdin.flush()
        report: dict[str, Any] = json.loads(self._process.stdout.readline())
        return report

    def close(self) -> None:
        """End the process; it has nothing to do any more."""
        self._process.communicate(timeout=60)


def _report(plan: dict[str, Any]) -> dict[str, Any]:
    try:
        actions = import_module(plan["module"]).ACTIONS
        report: dict[str, Any] = actions[plan["do"]](plan)
        return report
    except Exception:
        return {"wrong": traceback.format_exc()}


def main() -> None:
    """Answer each line of the standard input, a plan, with a line, its report."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_report(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
