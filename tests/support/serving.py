"""A process of its own for runs that are forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["Server"]


class Server:
    """A process that imports once and forks runs: `module` answers plans with reports."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, plan: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(plan) + "\n")
        self._process.stdin.flush()
        report: dict[str, Any] = json.loads(self._process.stdout.readline())
        return report

    def close(self) -> None:
        self._process.communicate(timeout=60)
