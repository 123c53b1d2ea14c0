"""Compare steps with the optimizer's state in float32, bfloat16 and 8 bits, in turns.

    python scripts/bench/optimizer_state.py --shape 270m
    python scripts/bench/optimizer_state.py --shape 270m --megabytes-per-s 200

Every run is a process of its own. With --megabytes-per-s the disk reads and writes that much at the
most, each way (by the io limits of a control group).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slow_disk import ROOT, SHAPES, run_once, write_config

from swaptrain.verbs.stored_step import live_store

__all__ = ["main"]

STATES = ("float32", "bfloat16", "8bit")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="270m", help="a Llama of this size")
    parser.add_argument("--host", default="512MiB")
    parser.add_argument("--megabytes-per-s", type=int, help="of the disk; default: as it is")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {state: [] for state in options.states}
    parameters = 0
    for _ in range(options.rounds):
        for state in options.states:
            with tempfile.TemporaryDirectory(dir=options.directory) as folder:
                work = Path(folder).resolve()
                options.config = write_config(work / "job", options.shape, micro_batches=1, steps=1)
                options.override = [f"optimizer.state={state}"]
                limit = options.megabytes_per_s
                found[state] += run_once(options, limit, options.micro_batches, work)
                parameters = count(work / f"{limit}-{options.micro_batches}")
    speed = options.megabytes_per_s
    where = "the disk as it is" if speed is None else f"{speed} + {speed} MB/s"
    title = f"{options.shape}, {parameters:,} parameters, memory.host {options.host}, {where}"
    print_table(title, found, parameters)


def count(run: Path) -> int:
    """Return how many parameters a run has."""
    rows = (row for one in live_store(run).records.values() for row in one.table)
    return sum(_size(row) for row in rows if row.array.startswith("weights"))


def _size(row: Any) -> int:
    size = 1
    for extent in row.shape:
        size *= extent
    return size


def print_table(title: str, found: dict[str, list[dict[str, Any]]], parameters: int) -> None:
    """Print the medians of the steps, and how much shorter they are than with float32."""
    table = Table("state", "step s", "of float32", "update s", "read B", "written B", "roofline",
                  title=title)  # fmt: skip

    def median(state: str, key: str) -> float:
        return statistics.median(row[key] for row in found[state])

    for state in found:
        shorter = median("float32", "step_s") / median(state, "step_s") if "float32" in found else 0
        table.add_row(
            state,
            f"{median(state, 'step_s'):.2f}",
            f"{shorter:.2f} x",
            f"{median(state, 'update_s'):.2f}",
            f"{median(state, 'read_bytes') / parameters:.2f}",
            f"{median(state, 'write_bytes') / parameters:.2f}",
            f"{median(state, 'roofline_fraction'):.2f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
