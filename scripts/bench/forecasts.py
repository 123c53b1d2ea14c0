"""Compare what starts forecast of a step with what was measured, over many configs.

    python scripts/bench/forecasts.py
    python scripts/bench/forecasts.py --megabytes-per-s 200 --only clipping adapters

Each config is trained in a process of its own, with the machine's speeds measured anew; the
forecast is the one that its start recorded (starts.jsonl). With --megabytes-per-s the disk reads
and writes that much at the most, each way (by the io limits of a control group; needs root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from slow_disk import ROOT, run_once, write_config

__all__ = ["main"]

_LORA = ["lora.r=8", "lora.target_modules=all-linear", "optimizer.lr=1e-3"]
CASES: dict[str, tuple[str, str, int, list[str]]] = {
    # name: shape, memory.host, micro-batches, keys over the config
    "270m": ("270m", "768MiB", 1, []),
    "four micro-batches": ("270m", "768MiB", 4, []),
    "more memory": ("270m", "2GiB", 1, []),
    "clipping": ("270m", "1GiB", 1, ["optimizer.clip_norm=1.0"]),
    "float32": ("270m", "1GiB", 1, ["model.dtype=float32"]),
    "8bit": ("270m", "512MiB", 1, ["optimizer.state=8bit"]),
    "steps": ("270m", "768MiB", 1, ["store.commit.unit=step"]),
    "adapters": ("270m", "512MiB", 1, _LORA),
    "in memory": ("270m", "6GiB", 1, []),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--megabytes-per-s", type=int, help="of the disk; default: as it is")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    limit = options.megabytes_per_s
    table = Table(
        "config", "step s", "forecast", "", "read MiB", "forecast", "written MiB", "forecast",
        "peak MiB", "forecast",
        title="the disk as it is" if limit is None else f"{limit} + {limit} MB/s",
    )  # fmt: skip
    for name in options.only:
        shape, options.host, micro_batches, options.override = CASES[name]
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            work = Path(folder).resolve()
            options.config = write_config(work / "job", shape, micro_batches=1, steps=1)
            rows = run_once(options, limit, micro_batches, work)
            starts = (work / f"{limit}-{micro_batches}" / "starts.jsonl").read_text().splitlines()
        table.add_row(name, *cells(json.loads(starts[-1])["forecast"], rows))
    Console(width=120).print(table)


def cells(forecast: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return measured and forecast figures of one config, as text."""

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    step_s, expected_s = median("step_s"), forecast["step_s"]
    found = [f"{step_s:.2f}"]
    found += (
        ["-", ""] if expected_s is None else [f"{expected_s:.2f}", f"{expected_s / step_s:.2f}"]
    )
    for key in ("read_bytes", "write_bytes"):
        expected = forecast[key]
        found += [f"{median(key) / 2**20:,.1f}"]
        found += ["-" if expected is None else f"{expected / 2**20:,.1f}"]
    peak_bytes = max(row["peak_host_bytes"] for row in rows)
    return [*found, f"{peak_bytes / 2**20:,.0f}", f"{forecast['peak_host_bytes'] / 2**20:,.0f}"]


if __name__ == "__main__":
    main()
