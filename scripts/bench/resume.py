"""Measure how long a run that goes on takes from the command to its first step.

    python scripts/bench/resume.py [--config FILE] [--rounds 3]

The run is begun with one step, and each round gives it one more. Prints seconds by the clock and of
the processor until the first words, and until training goes on, medians of the rounds. The first
round measures what a run records for its next starts, and is shown by itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    table = Table("start", "first words s", "to the first step s", "of the processor s")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        work = Path(folder).resolve()
        rows = [start(options.config, work, step) for step in range(1, options.rounds + 2)]
    table.add_row("the first", *(f"{value:.1f}" for value in rows[0]))
    medians = [statistics.median(values) for values in zip(*rows[1:], strict=True)]
    table.add_row(f"going on, {options.rounds} times", *(f"{value:.1f}" for value in medians))
    Console(width=100).print(table)


def start(config: Path, work: Path, steps: int) -> tuple[float, float, float]:
    """Train to `steps`; return seconds to the first line, to the first step, and of processor."""
    command = [sys.executable, "-u", "-m", "swaptrain", "--config", str(config)]
    command += [f"train.steps={steps}", f"run.dir={work / 'run'}", f"data.cache={work / 'tokens'}"]
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    first_s = trains_s = busy_s = 0.0
    said = []
    for line in process.stdout:
        said.append(line)
        first_s = first_s or time.perf_counter() - begun
        if not trains_s and line.startswith(("training ", "going on with step ")):
            trains_s, busy_s = time.perf_counter() - begun, processor_s(process.pid)
    if process.wait() or not trains_s:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(said)}")
    return first_s, trains_s, busy_s


def processor_s(pid: int) -> float:
    """Return the seconds that a process has computed, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


if __name__ == "__main__":
    main()
