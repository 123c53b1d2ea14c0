"""What a start measured of the model's instructions, kept in the run directory for the next one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from swaptrain.config.schema import Config
from swaptrain.errors import RunError
from swaptrain.machine.fingerprint import this_machine
from swaptrain.planning.measure.measured import Measured
from swaptrain.program.instructions import Operation
from swaptrain.store.disk.durable_files import write_aside
from swaptrain.strict_json import read_json

__all__ = ["MeasuredRecord"]

_FORMAT = 1
_MOST_BYTES = 2**22
_MOST_S, _MOST_HELD = 1e6, 2**60

_InstructionKind = tuple[Operation, int, bool]


class MeasuredRecord:
    """The figures of one cut under one budget on one machine; figures of another are not taken.

    A start that finds them runs each instruction once, where it would run it up to six times. They
    were written by anybody, so each number is looked at, and what torch takes is never believed to
    be less than what this start sees.
    """

    def __init__(self, path: Path, config: Config, fingerprint: str, cuts: Iterable[int]) -> None:
        """Take the file, and what the figures depend on."""
        self._path = path
        about: dict[str, Any] = {
            "format": _FORMAT,
            "fingerprint": fingerprint,
            "cuts": list(cuts),
            "host": config.memory.host,
            "recompute": config.train.recompute,
            "micro_batches": config.data.micro_batches,
            "threads": torch.get_num_threads(),
            "machine": this_machine(torch.device("cpu")),
        }
        if config.memory.tokens is not None:
            about["tokens"] = config.memory.tokens
        self._key = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def read(self) -> Measured | None:
        """Return the figures; None where there are none of this key, or the machine was busy then.

        On a machine that is busy now too they are taken all the same.
        """
        try:
            tree = read_json(self._path, _MOST_BYTES)
            if tree["key"] != self._key or (tree["busy"] and not _is_busy()):
                return None
            return Measured(
                arena_bytes=_held(tree["arena_bytes"]),
                seconds=_by_kind(tree["seconds"], _seconds),
                decoding_s={_held(k): _seconds(value) for k, value in tree["decoding_s"]},
                own_bytes=_by_kind(tree["own_bytes"], _held),
                tier_s=_seconds(tree["tier_s"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, measured: Measured) -> None:
        """Keep figures for the next start; a disk that refuses lets it measure again."""
        tree = {
            "key": self._key,
            "busy": _is_busy(),
            "arena_bytes": measured.arena_bytes,
            "seconds": _rows(measured.seconds),
            "decoding_s": list(measured.decoding_s.items()),
            "own_bytes": _rows(measured.own_bytes),
            "tier_s": measured.tier_s,
        }
        with suppress(RunError):
            write_aside(self._path, json.dumps(tree).encode())


def _rows(found: Mapping[_InstructionKind, int | float]) -> list[Any]:
    return [
        [operation, number, saves, value] for (operation, number, saves), value in found.items()
    ]


def _by_kind(rows: Any, figure: Any) -> dict[_InstructionKind, Any]:
    return {
        (Operation(operation), _held(number), bool(saves)): figure(value)
        for operation, number, saves, value in rows
    }


def _held(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_HELD:
        raise ValueError("no count")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < _MOST_S:
        raise ValueError("no seconds")
    return float(value)


def _is_busy() -> bool:
    """Whether more processes want to run than there are cores, over the last minute."""
    return os.getloadavg()[0] > len(os.sched_getaffinity(0))
