"""Measure or rehearse a run of several processes: bytes of each rank, and seconds of a step.

`measure` trains one process, and then several of one thread each by torchrun, and prints medians of
what metrics.jsonl says. `rehearse` lets the real tier of each rank run on a clock, with this
machine's figures and a link of a given speed, as `plan --ranks` does: for more ranks than there are
processors, and rank by rank. Its seconds are those of all ranks together, with nothing computed
beside an exchange.

    python scripts/bench/ranks.py measure --config configs/quickstart.yaml --ranks 2
    python scripts/bench/ranks.py rehearse --config configs/quickstart.yaml --ranks 1 2 4 8
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swaptrain.compute.device import open_device
from swaptrain.config.load import load_config
from swaptrain.config.schema import Config
from swaptrain.machine.speeds import machine
from swaptrain.planning.rank_costs import price_ranks, step_committed
from swaptrain.store.disk.durable_files import existing_parent
from swaptrain.store.paths import rank_dirs
from swaptrain.units import format_size, parse_size
from swaptrain.verbs.plans.planned import planned
from swaptrain.verbs.plans.ranks import check_ranks_asked, rank_plans

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_SKIPPED = 2
"""Steps at the beginning, in which memory is filled."""


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[_SKIPPED:]
    return [json.loads(line) for line in lines]


def _measure(config: Path, overrides: Sequence[str], counts: Sequence[int], table: Table) -> None:
    """Train as one process, and as each number of ranks, one thread each."""
    for count in counts:
        folder = Path(tempfile.mkdtemp(dir=ROOT, prefix="ranks-"))
        run = folder / "run"
        command = [sys.executable, "-m"]
        if count > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
        command += ["swaptrain", "--config", str(config), *overrides]
        command += [f"run.dir={run}", "train.threads=1", "store.commit.unit=step"]
        try:
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            directories = rank_dirs(run) or [run]
            for rank, directory in enumerate(directories):
                rows = _rows(directory)
                _add(table, f"{count}", f"{rank}", [
                    statistics.median(float(row.get(key) or 0) for row in rows)
                    for key in (
                        "step_s", "exchange_wait_s", "read_bytes", "write_bytes", "exchange_bytes",
                    )
                ])  # fmt: skip
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _rehearse(config: Config, counts: Sequence[int], link: int, table: Table) -> None:
    """Price the step of all ranks together, and show each of them, as `plan --ranks` does it."""
    device = open_device(config.device, config.memory.device).device
    machine(existing_parent(config.run.dir.absolute()), device, [config.model.dtype], print)
    config = step_committed(config)
    found = planned(config)
    for count in counts:
        if count == 1:
            step_s = found.price.step_s or 0.0
            _add(table, "1", "0", [step_s, 0.0, found.read_bytes, found.write_bytes, 0])
            continue
        check_ranks_asked(config, [count])
        plans = rank_plans(found, count, lambda _: None)
        step = price_ranks(plans, config, found.machine, link)
        for rank, cost in enumerate(step.ranks):
            assert cost.traffic is not None, "the program is short enough"
            moved = (cost.traffic.read_bytes, cost.traffic.write_bytes, cost.exchanged_bytes)
            _add(table, f"{count}", f"{rank}", [step.step_s or 0.0, step.link_s, *moved])


def _add(table: Table, count: str, rank: str, found: Sequence[float]) -> None:
    step_s, exchange_s, *sizes = found
    shown = (format_size(int(size)) for size in sizes)
    table.add_row(count, rank, f"{step_s:.2f}", f"{exchange_s:.2f}", *shown)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("measure", "rehearse"))
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--link", default="1GB", help="bytes a second between ranks (rehearse)")
    parser.add_argument("overrides", nargs="*", metavar="KEY.SUB=VALUE")
    given = parser.parse_intermixed_args()
    table = Table("ranks", "rank", "s a step", "s exchange", "read", "written", "exchanged")
    if given.what == "measure":
        _measure(given.config, given.overrides, given.ranks, table)
    else:
        config = load_config(given.config, given.overrides)
        _rehearse(config, given.ranks, parse_size(given.link), table)
    Console().print(table)


if __name__ == "__main__":
    main()
