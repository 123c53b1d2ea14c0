"""Show what a second disk gives: a run's slots on one throttled disk, and on several.

Makes a disk of each of some files (loop devices with ext4), throttles each by the kernel (cgroups;
needs root), and trains one job with `store.paths` on one disk, on two and so on, one after the
other. `run.dir` lies on the first disk. The disks are mounted for this process alone, and a disk
goes when its mount does: a kill leaves none behind.

    python scripts/bench/disks.py
    python scripts/bench/disks.py --shape 270m --megabytes-per-s 200 --disks 1 2 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kernel_limits import SlowDisk, run_limited
from rich.console import Console
from rich.table import Table
from slow_disk import ROOT, SHAPES, write_config

__all__ = ["main", "new_disk"]

_ALONE = "SWAPTRAIN_BENCH_DISKS"
"""Set where mounts are this process's own."""
_SECTOR_BYTES = 512


@contextmanager
def new_disk(folder: Path, number: int, size_bytes: int) -> Iterator[Path]:
    """Make a disk of a file in `folder`, and mount it there; yield where.

    The file has no name any more and the device is detached as soon as it is not mounted, so that
    both go with the mount, whatever ends this process.
    """
    file, at = folder / f"disk-{number}.image", folder / f"disk-{number}"
    with file.open("wb") as image:
        image.truncate(size_bytes)
    _done("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(file))
    device = _done("losetup", "--find", "--show", "--direct-io=on", str(file))
    try:
        file.unlink()
        at.mkdir()
        _done("mount", device, str(at))
    finally:
        _done("losetup", "--detach", device)  # once nothing is mounted
    try:
        yield at
    finally:
        _done("umount", str(at))


def _done(*command: str) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}: {found.stderr.strip()}")
    return found.stdout.strip()


def run_on(options: argparse.Namespace, disks: Sequence[Path], work: Path) -> list[dict[str, Any]]:
    """Train in a process of its own; return the lines of its steps after the warm-up."""
    config = write_config(work / f"job-{len(disks)}", options.shape, micro_batches=1, steps=1)
    run_dir = disks[0] / "run"
    # The kernel ends it with this process.
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "swaptrain"]
    command += [
        "--config", str(config),
        f"memory.host={options.host}",
        f"data.micro_batches={options.micro_batches}",
        f"data.cache={work / 'tokens'}",
        f"train.steps={options.warmup + options.steps}",
        f"run.dir={run_dir}",
        f"store.paths=[{', '.join(map(str, disks))}]",
        *options.override,
    ]  # fmt: skip
    environment = {"XDG_CACHE_HOME": str(work / f"cache-{len(disks)}")}
    slow = SlowDisk(options.megabytes_per_s * 10**6, disks)
    done = run_limited(command, environment, disk=slow)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][options.warmup :]


def moved_bytes(disk: Path) -> int:
    """Return what the device of a mount has read and written, ever."""
    number = disk.stat().st_dev
    place = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat"
    fields = [int(field) for field in Path(place).read_text().split()]
    return _SECTOR_BYTES * (fields[2] + fields[6])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="270m", help="a Llama of this size")
    parser.add_argument("--host", default="512MiB")
    parser.add_argument("--megabytes-per-s", type=int, default=200, help="of each disk, each way")
    parser.add_argument("--disks", type=int, nargs="+", default=[1, 2], help="how many, in turn")
    parser.add_argument("--gib", type=int, default=12, help="of each disk; taken as it is written")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs", help="on the disk to use")
    parser.add_argument("override", nargs="*", help="key.sub=value, as of swaptrain itself")
    options = parser.parse_args(arguments)
    if _ALONE not in os.environ:  # mounts that the kernel takes back with this process
        again = [sys.executable, str(Path(__file__).resolve())]
        again += sys.argv[1:] if arguments is None else arguments
        os.execvpe("unshare", ["unshare", "--mount", *again], {**os.environ, _ALONE: "1"})
    options.directory.mkdir(parents=True, exist_ok=True)
    table = Table(
        "disks", "step s", "of one", "computing s", "waiting s", "read MiB", "written MiB",
        "roofline", "bytes of the disks", "loss",
        title=f"{options.shape}, memory.host {options.host}, "
        f"{options.megabytes_per_s} + {options.megabytes_per_s} MB/s each disk",
    )  # fmt: skip
    one_s = None
    for count in options.disks:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
            work = Path(folder).resolve()
            disks = [
                stack.enter_context(new_disk(work, number, options.gib << 30))
                for number in range(count)
            ]
            before = [moved_bytes(disk) for disk in disks]
            rows = run_on(options, disks, work)
            moved = [moved_bytes(disk) - own for disk, own in zip(disks, before, strict=True)]

        def median(key: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.median(row[key] for row in rows)

        step_s = median("step_s")
        one_s = step_s if count == 1 else one_s
        table.add_row(
            str(count),
            f"{step_s:.2f}",
            "" if one_s is None else f"{one_s / step_s:.2f} x",
            f"{median('compute_s') + median('update_s'):.2f}",
            f"{median('io_wait_s'):.2f}",
            f"{median('read_bytes') / 2**20:.0f}",
            f"{median('write_bytes') / 2**20:.0f}",
            "-" if rows[0]["roofline_fraction"] is None else f"{median('roofline_fraction'):.2f}",
            " : ".join(f"{own / sum(moved):.2f}" for own in moved),
            f"{rows[-1]['loss']:.6f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
