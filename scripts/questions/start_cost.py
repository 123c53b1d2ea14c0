"""Measure what a start takes to construct a model: with its initial weights drawn, and without.

    python scripts/questions/start_cost.py [--shape 1.3b] [--rounds 3]

A first start draws them; one that goes on, or begins from a checkpoint, does not. Prints medians of
rounds in turn, in seconds, after one of each that does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import nn

from swaptrain.capture.init.construct import construct
from swaptrain.config.load import load_config
from swaptrain.models.build import model_factory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for peers

from peers.job import SHAPES, write_config


def seconds(make: Callable[[], nn.Module], scratch: Path, *, draw: bool) -> float:
    """Return the seconds of one construction."""
    begun = time.perf_counter()
    construct(make, seed=0, scratch_dir=scratch, draw=draw)
    return time.perf_counter() - begun


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.3b")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        config = write_config(scratch / "job", options.shape, micro_batches=1, steps=1)
        factory = model_factory(load_config(config))
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(1 + options.rounds):
            for draw, found in taken.items():
                one = seconds(factory.make, scratch, draw=draw)
                found.extend([one] if number else [])
    table = Table("construction", "s")
    table.add_row("weights drawn", f"{statistics.median(taken[True]):.2f}")
    table.add_row("no draws", f"{statistics.median(taken[False]):.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
