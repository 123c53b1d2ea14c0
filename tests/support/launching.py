"""Starts ranks as processes of their own, by torchrun or in networks of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Started", "Wire", "started", "steps_of", "wired"]

_ROOT = Path(__file__).resolve().parents[2]
_MOST_S = 240
"""After which a process that has not ended is killed, and the test fails."""
_PAUSE_S = 0.01


class Started:
    """A process and what it says, on its standard output and error."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    def end(self) -> tuple[int, str]:
        """Wait for its end; return the exit code and what it has said."""
        code = self._process.wait(timeout=_MOST_S)
        return code, self.said()

    def said(self) -> str:
        """Return what it has said so far."""
        return self._log.read_text(errors="replace")

    def wait_for_steps(self, metrics: Path, count: int) -> None:
        """Wait until a run has done so many steps."""
        until = time.monotonic() + _MOST_S
        while steps_of(metrics) < count:
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(_PAUSE_S)


@contextmanager
def started(command: Sequence[str], log: Path, **environment: str) -> Iterator[Started]:
    """Start `python` with these arguments; what still runs at the end is killed."""
    own = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **own}, cwd=_ROOT
        )
    try:
        yield Started(process, log)
    finally:
        process.kill()
        process.wait()


def steps_of(metrics: Path) -> int:
    """Return how many steps a run has done."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


class Wire:
    """Two networks, as of two machines, and the wire between them."""

    def __init__(self, name: str) -> None:
        self.sides = [f"{name}-{side}" for side in range(2)]
        self.address = "10.213.77.1"
        """Of the first one."""

    def command(self, side: int, arguments: Sequence[str]) -> list[str]:
        """Return what starts `python` with these arguments in a network."""
        return ["ip", "netns", "exec", self.sides[side], sys.executable, *arguments]

    def cut(self) -> None:
        """Let nothing come through any more; nobody is told."""
        _ip("-n", self.sides[1], "link", "set", "wire", "down")

    def join(self) -> None:
        """Make it whole again."""
        _ip("-n", self.sides[1], "link", "set", "wire", "up")

    def open(self) -> None:
        """Make both networks. Raises OSError, CalledProcessError where that is not permitted."""
        for side in self.sides:
            _ip("netns", "add", side)
        first, second = self.sides
        ends = ("name", "wire", "netns", first), ("name", "wire", "netns", second)
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, side in enumerate(self.sides, 1):
            _ip("-n", side, "addr", "add", f"10.213.77.{number}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", side, "link", "set", device, "up")

    def close(self) -> None:
        """Delete both networks, as far as there are any."""
        for side in self.sides:
            subprocess.run(["ip", "netns", "delete", side], check=False, capture_output=True)


@contextmanager
def wired() -> Iterator[Wire]:
    """Yield two networks; raises OSError, CalledProcessError where that is not permitted."""
    wire = Wire(f"swaptrain-{os.getpid()}")
    try:
        wire.open()
        yield wire
    finally:
        wire.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
