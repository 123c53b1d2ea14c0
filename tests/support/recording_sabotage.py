"""What is left out of a run: a replay that finds nothing then would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from swaptrain.observe.metrics import MetricsFile
from swaptrain.store.disk import durable_files as files
from swaptrain.store.disk.direct import DirectIO
from swaptrain.store.format import record
from swaptrain.store.slots import slot_disks, slots
from tests.support.durability_sabotage import WITHOUT, leave_out

__all__ = ["SABOTAGES"]


class _NoFlush:
    """The os module without fdatasync."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return (lambda _: None) if name == "fdatasync" else getattr(self._module, name)


def _unflushed_chunks() -> None:
    write = DirectIO.write

    def without(self: DirectIO, path: Any, buffer: Any, **how: Any) -> Any:
        return write(self, path, buffer, **{**how, "flush": False})

    DirectIO.write = without  # type: ignore[method-assign]


def _unflushed_records() -> None:
    record.os = _NoFlush(record.os)  # type: ignore[attr-defined]


def _unflushed_switch() -> None:
    replace = files.replace_link

    def without(link: Any, target: str) -> None:
        flush, files.flush_directory = files.flush_directory, lambda _: None
        try:
            replace(link, target)
        finally:
            files.flush_directory = flush

    slots.replace_link = without  # type: ignore[attr-defined]


def _unflushed_metrics() -> None:
    MetricsFile.sync = lambda _: None  # type: ignore[method-assign]


def _unflushed_creation() -> None:
    slot_disks.flush_file_system = lambda _: None  # type: ignore[attr-defined]


SABOTAGES: dict[str, Callable[[], None]] = {
    "unflushed-chunks": _unflushed_chunks,
    "unflushed-records": _unflushed_records,
    "unflushed-switch": _unflushed_switch,
    "unflushed-metrics": _unflushed_metrics,
    "unflushed-creation": _unflushed_creation,
    **{f"without-{name.replace(' ', '-')}": partial(leave_out, name) for name in WITHOUT},
}
"""Each is applied in the process that is recorded."""
