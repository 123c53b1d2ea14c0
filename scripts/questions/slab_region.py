"""Train a job with slabs whose pages move, and with slabs in one region, as a GPU's are; compare.

Nothing is pinned here: calls that would pin are counted. In turns, each in a fresh run directory
that is deleted afterwards; medians of the steps behind the warm-up.

    python scripts/questions/slab_region.py configs/quickstart.yaml train.steps=40
    python scripts/questions/slab_region.py my_271m.yaml memory.host=2GiB train.steps=7 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from swaptrain.compute.copy_streams import StreamDevice
from swaptrain.compute.device import CpuDevice
from swaptrain.config.load import load_config
from swaptrain.machine.torch_settings import SPIN_COUNT
from swaptrain.memory import pinned
from swaptrain.memory.malloc import restart_without_cache, tune
from swaptrain.units import GIB
from swaptrain.verbs.train import train

WARM_UP = 2
COLUMNS = ("step_s", "compute_s", "io_wait_s")


class Counted:
    """What a device would be asked for; the rest of `Streams` is not used."""

    limit_bytes = 0
    device = None

    def __init__(self) -> None:
        self.pins = self.moved_bytes = 0

    def pin(self, address: int, nbytes: int) -> None:
        self.pins += 1

    def unpin(self, address: int, nbytes: int) -> None:
        """Nothing was pinned."""


def measure(kind: str, config: Path, overrides: list[str]) -> dict[str, float]:
    """Train in this process; return medians of the metrics, and pins and moved bytes of a step."""
    counted = Counted()
    if kind == "region":
        device = StreamDevice(counted)  # type: ignore[arg-type]
        CpuDevice.pool = lambda _, *a, **k: device.pool(*a, **k)  # type: ignore[assignment,method-assign]
        move = pinned._move

        def noted(slab: Any, start: int) -> None:
            counted.moved_bytes += slab.nbytes
            move(slab, start)

        pinned._move = noted
    marks: dict[int, tuple[int, int]] = {}

    def observe(step: int, _: object) -> None:
        marks.setdefault(step, (counted.pins, counted.moved_bytes))

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="slab-region-") as folder:
        run_dir = Path(folder) / "run"
        train(load_config(config, [*overrides, f"run.dir={run_dir}"]), observe=observe)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP:]
    found = {name: statistics.median(row[name] for row in rows) for name in COLUMNS}
    found["read_gib"] = statistics.median(row["read_bytes"] for row in rows) / GIB
    first, last = marks[WARM_UP + 1], marks[max(marks)]
    steps = max(marks) - WARM_UP - 1
    found["pins"] = (last[0] - first[0]) / steps
    found["moved_gib"] = (last[1] - first[1]) / steps / GIB
    return found


def main() -> None:
    """Run both in turns, each in a process of its own, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kind", choices=["pages", "region"], help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.kind is not None:
        tune()
        found = measure(options.kind, options.config, options.overrides)
        print(json.dumps({name: round(value, 4) for name, value in found.items()}))
        return
    for _ in range(options.rounds):
        for kind in ("pages", "region"):
            command = [sys.executable, __file__, str(options.config), *options.overrides]
            done = subprocess.run(
                [*command, "--kind", kind], stdout=subprocess.PIPE, text=True, check=True
            )
            print(f"{kind:6} {done.stdout.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    restart_without_cache()  # as the command does
    main()
