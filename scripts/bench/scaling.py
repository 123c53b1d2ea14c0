"""Show that a step's time grows with its bytes: seconds per planned byte over sizes of a model.

Trains Llamas in memory of a fourth of their state, each as a process of its own, and prints the
medians of a step beside the bytes that the plan says. Run directories are removed afterwards; the
largest needs 12 bytes of disk for each of its parameters, and room for spares.

    python scripts/bench/scaling.py
    python scripts/bench/scaling.py --shape 270m 1.3b --part 8
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from swaptrain.config.load import load_config
from swaptrain.memory.malloc import restart_without_cache, tune
from swaptrain.units import GIB, format_size
from swaptrain.verbs.plan import plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for peers

from peers.job import write_config

SHAPES = ["270m", "1.3b", "2.6b"]
_BYTES_PER_PARAMETER = 12


def measure(shape: str, options: argparse.Namespace, work: Path) -> list[str]:
    """Train one model; return its row of the table."""
    steps = options.warmup + options.steps
    config = write_config(work / shape, shape, micro_batches=options.micro_batches, steps=steps)
    parameters = plan(load_config(config, ["memory.host=1TiB"])).parameters
    host = f"memory.host={parameters * _BYTES_PER_PARAMETER // options.part // 2**20}MiB"
    command = [sys.executable, "-m", "swaptrain", "--config", str(config), host]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    lines = (work / shape / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][options.warmup :]
    planned = plan(load_config(config, [host]))
    assert planned.traffic is not None, "short enough to be rehearsed"

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    forecast = re.search(r"about (.*?) a step", done.stdout + done.stderr)
    moved = median("read_bytes") + median("write_bytes")
    return [
        f"{parameters:,}",
        host.removeprefix("memory.host="),
        f"{median('step_s'):.2f}",
        "-" if forecast is None else forecast[1],
        f"{median('compute_s') + median('update_s'):.2f}",
        f"{moved / GIB:.2f} GiB",
        format_size(planned.traffic.total_bytes),
        f"{planned.traffic.total_bytes / planned.least_traffic_bytes:.2f}",
        f"{median('step_s') / planned.traffic.total_bytes * 1e9:.3f}",
        # None where the disk's speed could not be measured.
        f"{median('roofline_fraction'):.2f}" if rows[0]["roofline_fraction"] is not None else "-",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure model after model and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--part", type=int, default=4, help="state / memory.host (default 4)")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("runs"), help="directory on the disk")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.part < 1:
        parser.error("--steps and --part are 1 or more")
    restart_without_cache()  # as the command does: plans are made here
    tune()
    options.work.mkdir(parents=True, exist_ok=True)
    table = Table(
        "parameters", "memory.host", "s/step", "forecast", "computing s", "moved", "planned",
        "over T_min", "ns per planned byte", "roofline",
    )  # fmt: skip
    for shape in options.shape:
        with tempfile.TemporaryDirectory(prefix="scaling.", dir=options.work) as work:
            table.add_row(*measure(shape, options, Path(work).resolve()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
