"""Show that a slow disk breaks nothing: steps on a throttled disk against that disk's own floor.

Runs one config with the disk as it is and throttled by the kernel (cgroups; needs root), each time
with the machine's speeds measured anew, and prints the medians of a step. Run directories are
removed afterwards.

    python scripts/bench/slow_disk.py
    python scripts/bench/slow_disk.py --megabytes-per-s 200 50 --micro-batches 1 4
    python scripts/bench/slow_disk.py store.commit.lag=1 --shape 270m --host 2GiB \
        --megabytes-per-s 600
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_limits import SlowDisk, run_limited
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for peers

from peers.job import SHAPES, write_config

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]


def run_once(
    options: argparse.Namespace, megabytes_per_s: int | None, micro_batches: int, work: Path
) -> list[dict[str, Any]]:
    """Train in a process of its own; return the lines of its steps after the warm-up."""
    run_dir = work / f"{megabytes_per_s}-{micro_batches}"
    command = [sys.executable, "-m", "swaptrain", "--config", str(options.config)]
    command += [
        f"memory.host={options.host}",
        f"data.micro_batches={micro_batches}",
        f"train.steps={options.warmup + options.steps}",
        f"run.dir={run_dir}",
        f"data.cache={work / 'tokens'}",
        *options.override,
    ]
    environment = {"XDG_CACHE_HOME": str(run_dir.with_suffix(".cache"))}
    disk = None if megabytes_per_s is None else SlowDisk(megabytes_per_s * 10**6, [work])
    done = run_limited(command, environment, disk=disk)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][options.warmup :]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "io_vs_compute.yaml")
    parser.add_argument("--shape", choices=SHAPES, help="a Llama of this size instead of a config")
    parser.add_argument("--host", default="256MiB")
    parser.add_argument("--megabytes-per-s", type=int, nargs="+", default=[200])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    parser.add_argument("override", nargs="*", help="key.sub=value, as of swaptrain itself")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    table = Table(
        "disk", "micro-batches", "step s", "computing s", "waiting s", "read MiB", "written MiB",
        "roofline", "loss",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        if options.shape is not None:
            job = Path(folder).resolve() / "job"
            options.config = write_config(job, options.shape, micro_batches=1, steps=1)
        for micro_batches in options.micro_batches:
            for limit in (None, *options.megabytes_per_s):
                rows = run_once(options, limit, micro_batches, Path(folder))

                def median(key: str, rows: list[dict[str, Any]] = rows) -> float:
                    return statistics.median(row[key] for row in rows)

                table.add_row(
                    "as it is" if limit is None else f"{limit} + {limit} MB/s",
                    str(micro_batches),
                    f"{median('step_s'):.2f}",
                    f"{median('compute_s') + median('update_s'):.2f}",
                    f"{median('io_wait_s'):.2f}",
                    f"{median('read_bytes') / 2**20:.0f}",
                    f"{median('write_bytes') / 2**20:.0f}",
                    f"{median('roofline_fraction'):.2f}",
                    f"{rows[-1]['loss']:.6f}",
                )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
