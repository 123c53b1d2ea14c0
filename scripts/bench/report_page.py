"""Measure what the page of a long run takes: seconds, and bytes of the file.

    python scripts/bench/report_page.py [--steps 10000 100000]

Trains a few steps of the quickstart's config with a trace, writes their lines of metrics.jsonl
again and again, with their steps counted on, and makes the page of that. Needs
`pip install 'swaptrain[report]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swaptrain.units import format_size

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_TRAINED = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    table = Table("steps", "seconds, of them start and imports", "page")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        run = Path(folder).resolve() / "run"
        keys = [f"train.steps={_TRAINED}", f"run.dir={run}", "run.trace=5"]
        swaptrain("--config", str(options.config), *keys)
        start_s = swaptrain("report", "--help")
        metrics, page = run / "metrics.jsonl", run / "report.html"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        for steps in options.steps:
            repeated = ({**row, "step": n} for n, row in enumerate(islice(cycle(rows), steps), 1))
            metrics.write_text("".join(json.dumps(row) + "\n" for row in repeated))
            took_s = swaptrain("report", str(run))
            size = format_size(page.stat().st_size)
            table.add_row(f"{steps:,}", f"{took_s:.1f}, {start_s:.1f}", size)
    Console(width=100).print(table)


def swaptrain(*arguments: str) -> float:
    """Run the command; return its seconds."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "swaptrain", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
