"""What this machine can do, measured once and kept for the next run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from swaptrain.errors import SwaptrainError
from swaptrain.machine.fingerprint import this_machine
from swaptrain.machine.probe import FILE_BYTES, Machine, measure
from swaptrain.program.cost import Disk, IOWork
from swaptrain.store.disk.durable_files import existing_parent, free_bytes, user_cache
from swaptrain.strict_json import read_json

__all__ = ["Machine", "cache_path", "known_machine", "machine"]

_FORMAT = 7
_MOST_BYTES = 2**20
_MOST_PER_S = 1e18


def cache_path() -> Path:
    """Return the file where measurements are kept."""
    return user_cache() / "speeds.json"


def known_machine(path: Path, device: torch.device) -> Machine | None:
    """Return what was measured before for the disk of `path`, None if nothing was."""
    return _known(path, device)[0]


def _known(path: Path, device: torch.device) -> tuple[Machine | None, bool]:
    """Return what was measured, and whether the machine was busy then, so that it may be wrong."""
    entry = _read_cache().get(_key(path, device))
    try:
        return (None, False) if entry is None else (_from_json(entry), bool(entry.get("busy")))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None, False


def machine(
    path: Path, device: torch.device, dtypes: Sequence[str], note: Callable[[str], None]
) -> Machine | None:
    """Return the machine's figures, measuring them in the directory `path` the first time.

    Measured again when the disk or the processor is another one, when the figures cannot be read,
    and, on a machine that was busy at the time, once it is not: the better ones of both are kept.
    Takes about six seconds, 128 MiB of disk and 20 MiB of memory. None where the disk refuses: a
    run does not fail because its speed is unknown.
    """
    known, busy = _known(path, device)
    busy_now = _is_busy()
    if (
        known is not None
        and (busy_now or not busy)
        and all(dtype in known.flops_per_s for dtype in dtypes)
    ):
        return known
    free = free_bytes(path)
    if free is not None and free < 2 * FILE_BYTES:
        return None
    note(
        "measuring the disk and the processor, six seconds"
        + (": other processes are at work, so it will be done again" if busy_now else "")
    )
    try:
        flops = {} if known is None or busy else known.flops_per_s
        found = _better(known, measure(path, device, dtypes, flops))
    except (SwaptrainError, OSError, torch.OutOfMemoryError) as error:
        said = str(error).partition("\n")[0]
        note(f"the speed of the disk and the processor cannot be measured: {said}")
        return None
    _write_cache(_key(path, device), {**asdict(found), "busy": busy_now})
    return found


def _better(first: Machine | None, second: Machine) -> Machine:
    """Return the higher speeds of two measurements: work beside them only makes them lower."""
    if first is None:
        return second
    before = vars(first.disk)
    speeds = {name: max(speed, before[name]) for name, speed in vars(second.disk).items()}
    flops = {**first.flops_per_s, **second.flops_per_s}
    flops = {dtype: max(speed, first.flops_per_s.get(dtype, 0.0)) for dtype, speed in flops.items()}
    work = vars(first.io_work)
    least = {name: min(cost, work[name]) for name, cost in vars(second.io_work).items()}
    return Machine(Disk(**speeds), min(first.sigma, second.sigma), IOWork(**least), flops)


def _is_busy() -> bool:
    """Whether more processes want to run than there are cores, over the last minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))


def _key(path: Path, device: torch.device) -> str:
    """Name the machine, the disk and the processor: other ones have figures of their own."""
    there = existing_parent(path)
    number, system = there.stat().st_dev, os.statvfs(there)
    disk = f"{os.major(number)}:{os.minor(number)} of {system.f_blocks * system.f_frsize} bytes"
    here = this_machine(device)
    processor = here["device"] if device.type == "cuda" else here["processor"]
    threads = torch.get_num_threads()
    return f"{_FORMAT} {socket.gethostname()} disk {disk} {processor} {threads} threads"


def _from_json(entry: dict[str, Any]) -> Machine:
    """Return figures that can be reckoned with; raises ValueError or TypeError for others."""
    work = IOWork(**{name: entry["io_work"][name] for name in vars(IOWork())})
    found = Machine(Disk(**entry["disk"]), entry["sigma"], work, dict(entry["flops_per_s"]))
    speeds = [*vars(found.disk).values(), *found.flops_per_s.values()]
    if not all(type(speed) is float and 0 < speed < _MOST_PER_S for speed in speeds):
        raise ValueError("a speed is not a number greater than 0")
    if type(found.sigma) not in {int, float} or not 0 <= found.sigma <= 1:
        raise ValueError("sigma does not lie between 0 and 1")
    if not all(type(cost) is float and 0 <= cost < 1 for cost in vars(work).values()):
        raise ValueError("what I/O costs does not lie between 0 and 1 second")
    return found


def _read_cache() -> dict[str, Any]:
    try:
        tree = read_json(cache_path(), _MOST_BYTES)
    except (OSError, ValueError):
        return {}  # never measured, or not readable: it is measured again
    return tree if isinstance(tree, dict) else {}


def _write_cache(key: str, entry: dict[str, Any]) -> None:
    with suppress(OSError):  # a home that cannot be written: the next run measures again
        path = cache_path()
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({**_read_cache(), key: entry}, indent=1))
        aside.replace(path)
