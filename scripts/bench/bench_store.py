"""Compare the store's hot path with fio and with zarr's own ways to the same chunk files.

    python scripts/bench/bench_store.py [DIRECTORY]

Writes and reads one uncompressed array through swaptrain's direct I/O (chunks flushed, checksums
computed and compared), through zarr-python and through tensorstore, and runs fio where it is
installed (its 4 MiB requests, eight in flight). Prints medians of GB/s and the CPU-seconds that a
GiB costs, which are taken from computing. The page cache is dropped before each read.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from rich.console import Console
from rich.table import Table

from swaptrain.program.tensors import TensorSpec
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.disk.io_buffers import io_buffer
from swaptrain.store.format.layout import lay_out
from swaptrain.store.slots.array_files import ArrayFiles
from swaptrain.units import GIB, MIB, format_size, parse_size

__all__ = ["main"]


@dataclass(frozen=True)
class Speed:
    """Medians of one way to the disk."""

    name: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    write_cpu_s_per_gib: float
    read_cpu_s_per_gib: float


def measure(
    name: str, nbytes: int, write: Callable[[], object], read: Callable[[], object],
    path: Path, rounds: int,
) -> Speed:  # fmt: skip
    """Time writes and reads in turn, after one round of warm-up."""
    timings: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
    for _ in range(rounds + 1):
        for what, action in (("write", write), ("read", read)):
            drop_pages(path)
            begun, cpu = time.perf_counter(), cpu_s()
            action()
            timings[what].append((time.perf_counter() - begun, cpu_s() - cpu))

    def medians(what: str) -> tuple[float, float]:
        kept = timings[what][1:]
        seconds = statistics.median(s for s, _ in kept)
        return nbytes / seconds, statistics.median(c for _, c in kept) * GIB / nbytes

    (write_speed, write_cpu), (read_speed, read_cpu) = medians("write"), medians("read")
    return Speed(name, write_speed, read_speed, write_cpu, read_cpu)


def cpu_s() -> float:
    """Return the CPU-seconds of this process and of the children that it waited for."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for usage in [resource.getrusage(who)]
    )


def drop_pages(path: Path) -> None:
    """Flush every file below a directory and drop its pages from the cache."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def swaptrain_speed(work: Path, data: np.ndarray[Any, Any], chunk: int, rounds: int) -> Speed:
    """Measure the way that training takes."""
    tensor = TensorSpec("w", (data.size,), (1,), "float32")
    layout = lay_out("weights", "float32", [tensor], chunk_limit_bytes=chunk)
    files = ArrayFiles.of_layout(work / "swaptrain", layout)
    files.create()
    buffer = io_buffer(layout.nbytes)
    buffer[: data.nbytes] = data.view(np.uint8).data
    sums: list[int] = []
    with DirectIO() as io:

        def write() -> None:
            sums[:] = [f.result() for f in files.write(io, buffer, flush=True)]

        def read() -> None:
            for future in files.read(io, buffer, checksums=sums):
                future.result()

        return measure("swaptrain, direct I/O", data.nbytes, write, read, files.path, rounds)


def zarr_speed(work: Path, data: np.ndarray[Any, Any], chunk: int, rounds: int) -> Speed:
    """Measure zarr-python over its LocalStore, flushed afterwards as durability would need."""
    path = work / "zarr-python"
    array = zarr.create_array(
        path, shape=data.shape, chunks=(chunk // 4,), dtype="float32", compressors=None
    )

    def write() -> None:
        array[:] = data
        drop_pages(path)

    def read() -> None:
        array[:]

    return measure("zarr-python, LocalStore", data.nbytes, write, read, path, rounds)


def tensorstore_speed(work: Path, data: np.ndarray[Any, Any], chunk: int, rounds: int) -> Speed:
    """Measure tensorstore's zarr3 driver, flushed afterwards."""
    import tensorstore

    path = work / "tensorstore"
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {
            "shape": list(data.shape),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk // 4]}},
            "data_type": "float32",
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }
    array = tensorstore.open(spec, create=True).result()

    def write() -> None:
        array.write(data).result()
        drop_pages(path)

    def read() -> None:
        tensorstore.open({"driver": "zarr3", "kvstore": spec["kvstore"]}).result().read().result()

    return measure("tensorstore, zarr3", data.nbytes, write, read, path, rounds)


def fio_speed(work: Path, nbytes: int, rounds: int) -> Speed:
    """Measure what fio reaches: libaio, direct, 4 MiB requests, eight in flight."""
    path = work / "fio"
    path.mkdir()

    def run(mode: str) -> Callable[[], None]:
        command = ["fio", "--name=bench", f"--directory={path}", f"--rw={mode}"]
        command += [f"--bs={min(4 * MIB, nbytes)}"]
        command += ["--direct=1", "--ioengine=libaio", "--iodepth=8", f"--size={nbytes}"]
        command += ["--end_fsync=1", "--output-format=json"]

        def action() -> None:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            speeds[mode].append(job["read" if mode == "read" else "write"]["bw_bytes"])

        return action

    speeds: dict[str, list[float]] = {"write": [], "read": []}
    timed = measure("fio", nbytes, run("write"), run("read"), path, rounds)
    # fio's own clock leaves its start out.
    best = {mode: statistics.median(found[1:]) for mode, found in speeds.items()}
    return Speed("fio", best["write"], best["read"], timed.write_cpu_s_per_gib,
                 timed.read_cpu_s_per_gib)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"),
                        help="on the disk to measure (default: runs)")  # fmt: skip
    parser.add_argument("--size", type=parse_size, default=GIB, help="bytes moved (default 1GiB)")
    parser.add_argument("--chunk", type=parse_size, default=64 * MIB, help="default 64MiB")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    options = parser.parse_args(argv)
    options.directory.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(0).random(options.size // 4, dtype=np.float32)
    speeds = []
    with tempfile.TemporaryDirectory(prefix="bench_store.", dir=options.directory) as directory:
        work = Path(directory)
        ways = [swaptrain_speed, zarr_speed]
        try:
            import tensorstore  # noqa: F401

            ways.append(tensorstore_speed)
        except ImportError:
            print("tensorstore is not installed: left out", file=sys.stderr)
        if shutil.which("fio"):
            speeds.append(fio_speed(work, options.size, options.rounds))
            shutil.rmtree(work / "fio")
        else:
            print("fio is not installed: left out", file=sys.stderr)
        for way in ways:
            speeds.append(way(work, data, options.chunk, options.rounds))
    table = Table(title=f"{format_size(options.size)} in chunks of {format_size(options.chunk)}")
    table.add_column("way")
    for name in ("write GB/s", "read GB/s", "write CPU-s/GiB", "read CPU-s/GiB"):
        table.add_column(name, justify="right")
    for s in speeds:
        table.add_row(
            s.name,
            f"{s.write_bytes_per_s / 1e9:.2f}",
            f"{s.read_bytes_per_s / 1e9:.2f}",
            f"{s.write_cpu_s_per_gib:.2f}",
            f"{s.read_cpu_s_per_gib:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
