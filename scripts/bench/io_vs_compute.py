"""Measure what a memory budget costs: seconds and bytes of a step against their floors.

Runs one config over several values of memory.host and data.micro_batches, each as a process of its
own, and prints and plots the medians of a step. The run directories are removed afterwards.

    python scripts/bench/io_vs_compute.py
    python scripts/bench/io_vs_compute.py --config configs/big.yaml --host 5GiB --micro-batches 4
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disk_speed import disk_bytes_per_s
from rich.console import Console
from rich.table import Table

from swaptrain.config.load import load_config
from swaptrain.errors import BudgetError
from swaptrain.units import GIB, MIB, exact_size, format_size, parse_size
from swaptrain.verbs.plan import PlanReport, plan

__all__ = ["Point", "main"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Point:
    """Medians of one run's steps."""

    host_bytes: int
    micro_batches: int
    step_s: float
    compute_s: float
    update_s: float
    io_wait_s: float
    read_bytes: float
    write_bytes: float
    bytes_floor: float
    """T_min of docs/design.md, "The cost of a step", with the pool of this budget as the cache."""
    io_floor_s: float = 0.0
    compute_floor_s: float = 0.0

    @property
    def floor_s(self) -> float:
        """The larger of the two floors; what I/O costs the CPU (sigma) is left out."""
        return max(self.io_floor_s, self.compute_floor_s)


def run_once(
    options: argparse.Namespace, host_bytes: int, micro_batches: int, work: Path
) -> Point | None:
    """Train in a process of its own; return the medians, or None where the budget is refused."""
    run_dir = work / f"{exact_size(host_bytes)}-{micro_batches}"
    overrides = [
        *options.override,
        f"memory.host={exact_size(host_bytes)}",
        f"data.micro_batches={micro_batches}",
        f"train.steps={options.warmup + options.steps}",
        f"run.dir={run_dir}",
        f"data.cache={work / 'tokens'}",
    ]
    command = [sys.executable, "-m", "swaptrain", "--config", str(options.config), *overrides]
    try:
        report = plan(load_config(options.config, overrides))
    except BudgetError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines][options.warmup :]
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)

    def median(key: str) -> float:
        return float(statistics.median(row[key] for row in rows))

    return Point(
        host_bytes=host_bytes,
        micro_batches=micro_batches,
        step_s=median("step_s"),
        compute_s=median("compute_s"),
        update_s=median("update_s"),
        io_wait_s=median("io_wait_s"),
        read_bytes=median("read_bytes"),
        write_bytes=median("write_bytes"),
        bytes_floor=report.least_traffic_bytes,
    )


def default_budgets(report: PlanReport) -> list[int]:
    """Return the least budget, two between, and one in which the whole job fits."""
    state_bytes = sum(segment.state_bytes for segment in report.segments)
    least_bytes, all_bytes = parse_size(report.least_host), state_bytes + report.live_bytes
    return [-(-int(least_bytes + share * all_bytes) // MIB) * MIB for share in (0, 0.25, 0.5, 1.5)]


def measure(options: argparse.Namespace, work: Path) -> list[Point]:
    """Run all budgets and numbers of micro-batches, and set both floors of every point."""
    points: list[Point] = []
    for micro_batches in options.micro_batches:
        overrides = [*options.override, f"data.micro_batches={micro_batches}"]
        overrides.append(f"run.dir={work / 'new'}")
        budgets = options.host or default_budgets(plan(load_config(options.config, overrides)))
        measured = []
        for host_bytes in sorted(budgets):
            print(f"memory.host={exact_size(host_bytes)} data.micro_batches={micro_batches} ...")
            point = run_once(options, host_bytes, micro_batches, work)
            if point is not None:
                measured.append(point)
        if not measured:
            raise SystemExit("no budget of --host works for this config")
        roomiest = measured[-1]
        compute_floor_s = roomiest.compute_s + roomiest.update_s
        for point in measured:
            speed = disk_bytes_per_s(work, point.read_bytes, point.write_bytes)
            points.append(
                replace(
                    point,
                    io_floor_s=point.bytes_floor / speed,
                    compute_floor_s=compute_floor_s,
                )
            )
    return points


def show(points: Sequence[Point], parameters: int) -> None:
    """Print the table."""
    table = Table(title=f"medians of a step, {parameters / 1e6:,.1f} million parameters")
    names = ["memory.host", "micro-batches", "step s", "compute s", "update s", "wait s", "read"]
    names += ["written", "bytes/param", "floor", "I/O floor s", "compute floor s", "floor/step"]
    for name in names:
        table.add_column(name, justify="right")
    for p in points:
        table.add_row(
            exact_size(p.host_bytes),
            str(p.micro_batches),
            *(f"{value:.2f}" for value in (p.step_s, p.compute_s, p.update_s, p.io_wait_s)),
            format_size(p.read_bytes),
            format_size(p.write_bytes),
            f"{(p.read_bytes + p.write_bytes) / parameters:.1f}",
            f"{p.bytes_floor / parameters:.1f}",
            f"{p.io_floor_s:.2f}",
            f"{p.compute_floor_s:.2f}",
            f"{p.floor_s / p.step_s:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw seconds (stacked) and bytes of each point, with its floors as black marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (seconds, traffic) = pyplot.subplots(
        2, 1, figsize=(max(6.0, 1.1 * len(points)), 8), layout="constrained"
    )
    labels = [f"{exact_size(p.host_bytes)}\n{p.micro_batches} mb" for p in points]
    stacked(
        seconds,
        labels,
        {
            "compute": [p.compute_s for p in points],
            "update": [p.update_s for p in points],
            "waiting for the disk": [p.io_wait_s for p in points],
            "other": [max(0.0, p.step_s - p.compute_s - p.update_s - p.io_wait_s) for p in points],
        },
        ("#0072b2", "#56b4e9", "#e69f00", "#bbbbbb"),
    )
    marks(seconds, [p.io_floor_s for p in points], "I/O floor", "solid")
    marks(seconds, [p.compute_floor_s for p in points], "compute floor", "dotted")
    seconds.set_ylabel("seconds per step")
    gib = {"read": [p.read_bytes / GIB for p in points]}
    gib["written"] = [p.write_bytes / GIB for p in points]
    stacked(traffic, labels, gib, ("#009e73", "#d55e00"))
    marks(traffic, [p.bytes_floor / GIB for p in points], "least possible", "solid")
    traffic.set_ylabel("GiB per step")
    traffic.set_xlabel("memory.host and micro-batches (mb)")
    for axes in (seconds, traffic):
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def stacked(
    axes: Any, labels: Sequence[str], parts: dict[str, list[float]], colors: Sequence[str]
) -> None:
    """Draw one bar per label, its parts on top of each other."""
    bottom = [0.0] * len(labels)
    for (name, heights), color in zip(parts.items(), colors, strict=True):
        axes.bar(range(len(labels)), heights, 0.7, bottom=bottom, label=name, color=color)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(labels)), labels, fontsize="small")


def marks(axes: Any, heights: Sequence[float], name: str, style: str) -> None:
    """Draw a level across each bar."""
    left = [i - 0.42 for i in range(len(heights))]
    right = [i + 0.42 for i in range(len(heights))]
    axes.hlines(heights, left, right, colors="black", linestyles=style, label=name)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; --help explains them."""
    parser = argparse.ArgumentParser(
        description="Seconds and bytes of a step over memory budgets, against their floors."
    )
    parser.add_argument(
        "override", nargs="*", metavar="KEY=VALUE", help="config keys to set in every run"
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "io_vs_compute.yaml")
    parser.add_argument(
        "--host",
        nargs="+",
        type=parse_size,
        metavar="SIZE",
        help="values of memory.host; default: the least one, two more, and one that holds it all",
    )
    parser.add_argument(
        "--micro-batches", nargs="+", type=int, default=[1, 4], metavar="N", help="default: 1 4"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps measured (default 4)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default 2)")
    parser.add_argument(
        "--plot", type=Path, default=Path("runs/io_vs_compute.png"), help="the PNG to write"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs"),
        help="directory on the disk to measure; the runs are made and removed below it",
    )
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and plot."""
    options = parse(argv)
    options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="io_vs_compute.", dir=options.work) as directory:
        work = Path(directory)
        points = measure(options, work)
        overrides = [*options.override, f"run.dir={work / 'new'}"]
        show(points, plan(load_config(options.config, overrides)).parameters)
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    plot(points, options.plot)
    print(f"plot: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
