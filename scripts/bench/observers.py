"""Measure what watching a run costs: everything that looks at a step, against nothing of it.

    python scripts/bench/observers.py [--config FILE] [--steps 60] [--turns 3]

Watched are the memory of each instruction (`run.memory`), a trace of all steps (`run.trace`) and a
line for each step. Lines of metrics.jsonl are written by both. Prints the medians of a step, in
turns, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_WARMUP = 10
"""Steps in which memory is filled."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--steps", type=int, default=60, help="after a warm-up of ten")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    steps = _WARMUP + options.steps
    ways = {
        "nothing": [f"run.log_every={steps}"],
        "everything": ["run.log_every=1", "run.memory=true", f"run.trace={steps}"],
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for turn in range(options.turns):
            for name, keys in ways.items():
                run_dir = Path(folder).resolve() / f"{name}-{turn}"
                keys = [*keys, f"train.steps={steps}", f"run.dir={run_dir}"]
                found[name].append(step_seconds(options.config, run_dir, keys))
    table = Table("watched", "median step s", "of each turn")
    medians = {}
    for name, turns in found.items():
        medians[name] = statistics.median(chain.from_iterable(turns))
        each = ", ".join(f"{statistics.median(turn):.4f}" for turn in turns)
        table.add_row(name, f"{medians[name]:.4f}", each)
    Console(width=100).print(table, f"ratio {medians['everything'] / medians['nothing']:.4f}")


def step_seconds(config: Path, run_dir: Path, keys: Sequence[str]) -> list[float]:
    """Train in a process of its own; return the seconds of each step after the warm-up."""
    command = [sys.executable, "-m", "swaptrain", "--config", str(config), *keys]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[_WARMUP:]
    return [json.loads(line)["step_s"] for line in lines]


if __name__ == "__main__":
    main()
