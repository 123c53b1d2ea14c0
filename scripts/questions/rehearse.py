"""Rehearse steps of a config: what each number of saving segments would take.

python scripts/questions/rehearse.py --config FILE [key=value ...] [--disk-mb-s 500]

Takes the disk's and the processor's speed that a run on this machine measured, or, with
--disk-mb-s, a disk that reads and writes that much. Writes nothing. T_min is that of
docs/design.md, with what the largest instruction leaves of the slabs as its cache.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError
from swaptrain.machine.speeds import Machine, known_machine
from swaptrain.planning.choose import choose_plan
from swaptrain.planning.prepare import Prepared
from swaptrain.planning.step_bytes import boundary_bytes, state_bytes
from swaptrain.planning.step_cost import price
from swaptrain.program.cost import Disk, IOWork, least_traffic_bytes
from swaptrain.units import GIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--disk-mb-s", type=float, help="default: as this machine's was measured")
    options, overrides = parser.parse_known_args()
    try:
        config = load_config(options.config, overrides).resolved()
    except ConfigError as error:
        parser.error(str(error))
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    prepared = Prepared(config, None, lambda _: None, draw=False)
    machine = known_machine(config.run.dir, prepared.device.device)
    if options.disk_mb_s is not None:
        speed = options.disk_mb_s * 1e6
        work = IOWork() if machine is None else machine.io_work
        machine = Machine(Disk(speed, speed, speed), 0.0, work, {})
    table = Table("saving", "computing s", "step s", "read", "written", "over T_min")
    for recompute in (True, None, False):
        train = config.train.model_copy(update={"recompute": recompute})
        chosen = choose_plan(
            prepared.plan, config.model_copy(update={"train": train}), machine, disk_bytes=1 << 50
        )
        priced = price(chosen, config, machine)
        if priced.traffic is None:
            sys.exit("a step has too many instructions to be rehearsed")
        least = least_traffic_bytes(
            state_bytes(chosen),
            boundary_bytes(chosen),
            chosen.pool_bytes - chosen.peaks.instruction_bytes,
            commit_every=config.store.commit.every,
            unit="step" if config.store.commit.is_whole else "segment",
        )
        table.add_row(
            f"{len(chosen.builder.saves)}{' (chosen)' if recompute is None else ''}",
            f"{priced.compute_s:.2f}",
            "unknown" if priced.step_s is None else f"{priced.step_s:.2f}",
            f"{priced.traffic.read_bytes / GIB:.2f} GiB",
            f"{priced.traffic.write_bytes / GIB:.2f} GiB",
            f"{priced.traffic.total_bytes / least:.2f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
