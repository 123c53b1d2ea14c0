"""Shows a plan to a person."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import groupby

from rich.console import Console
from rich.table import Table

from swaptrain.config.schema import Config
from swaptrain.units import format_count, format_duration, format_size, format_wear, how_many
from swaptrain.verbs.plans.questions import COMMON_DRIVE_BYTES
from swaptrain.verbs.plans.report import PlanReport, Segment

__all__ = ["figures", "plan_console", "show"]

_LONGEST_S = 1000 * 366 * 86_400
"""A run of a thousand years is not dated."""

_MUCH_WAITING = 0.1
"""Part of a step in which it waits for data that is worth a word."""
_MOST_ROWS = 40
_COLUMNS = 36


def show(
    report: PlanReport,
    config: Config,
    *,
    drive_bytes: float = COMMON_DRIVE_BYTES,
    console: Console | None = None,
) -> None:
    """Print the segment table and the figures below it.

    `drive_bytes` are what the drive is guaranteed to take.
    """
    console = console or plan_console()
    console.print(_segment_table(report.segments))
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in figures(report, config, drive_bytes):
        rows.add_row(name, text)
    console.print(rows, markup=False, highlight=False)


def plan_console() -> Console:
    """Return the standard output, 110 columns wide where it is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = 110
    return console


def _segment_table(segments: tuple[Segment, ...]) -> Table:
    """Return one row per segment; of a model with many, neighbours of one class share a row."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("segment", "module", "parameters", "state MiB", "class"):
        right = name in ("parameters", "state MiB")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    groups = [[segment] for segment in segments]
    if len(segments) > _MOST_ROWS:
        groups = [list(group) for _, group in groupby(segments, key=lambda s: s.isomorphism)]
    if len(groups) > _MOST_ROWS:
        groups = [*groups[: _MOST_ROWS // 2], [], *groups[-_MOST_ROWS // 2 :]]
    for group in groups:
        if not group:
            table.add_row("...")
            continue
        first, last = group[0], group[-1]
        alone = first is last
        module = first.module if alone else f"{first.module} .. {last.module}"
        table.add_row(
            str(first.index) if alone else f"{first.index} to {last.index}",
            module if len(module) <= _COLUMNS else module[: _COLUMNS - 3] + "...",
            f"{first.parameters:,}" + ("" if alone else " each"),
            f"{first.state_bytes / 2**20:,.1f}" + ("" if alone else " each"),
            str(first.isomorphism),
        )
    return table


def figures(
    report: PlanReport, config: Config, drive_bytes: float = COMMON_DRIVE_BYTES
) -> Iterator[tuple[str, str]]:
    """Yield the figures below the table, each with its name; a name that is empty goes on."""
    size = format_size
    state_bytes = sum(segment.state_bytes for segment in report.segments)
    yield (
        "model",
        (
            f"{report.description}: {format_count(report.parameters)} parameters, "
            f"{size(state_bytes)} of state, {how_many(len(report.segments), 'segment')}"
            + (" (as recorded in the run)" if report.resumes else "")
        ),
    )
    if report.weighting is not None:
        yield "loss", report.weighting
    yield "trained", report.trained
    if report.rows is not None:
        yield "data.chat", report.rows
    if report.quantized is not None:
        yield "model.base", report.quantized
    if report.experts is not None:
        yield "memory.experts", f"layers of experts in ranges of {report.experts}"
    if report.embedding_rows is not None:
        yield "memory.rows", f"embeddings in ranges of {report.embedding_rows:,} rows"
    yield "base", f"{size(report.base_bytes)}: torch, the graph, the data; beside memory.host"
    yield (
        "memory.host",
        (
            f"{size(report.host_bytes)}: {size(report.pool_bytes)} of slabs, "
            f"{size(report.arena_bytes)} for computing; least that works: {report.least_host}"
        ),
    )
    yield (
        "largest",
        (
            f"{report.largest} needs {size(report.instruction_bytes)} of slabs; activations and "
            f"gradients take {size(report.live_bytes)} at most"
        ),
    )
    for need, free_bytes in zip(report.disk, report.free_disk_bytes, strict=True):
        kept = f"{size(need.snapshots_bytes)} of them for snapshots, "
        if not need.snapshots_bytes:
            kept = ""
        yield (
            "disk",
            (
                f"{need.path}: {size(need.total_bytes)} ({size(need.slots_bytes)} of slots, "
                + f"{kept}{size(need.spill_bytes)} of spill, {size(need.data_bytes)} of tokens), "
                + ("free room not known" if free_bytes is None else f"{size(free_bytes)} free")
            ),
        )
    if report.ranks_disk_bytes:
        each = (f"{size(nbytes)} of {count}" for count, nbytes in report.ranks_disk_bytes)
        yield "disk of a rank", f"{', '.join(each)} ranks"
    if report.occupied_disk_bytes:
        yield "", f"of that {size(report.occupied_disk_bytes)} are taken by the run already"
    if report.idle_steps:
        yield "learning rate", report.idle_steps
    yield from _traffic(report, drive_bytes)
    yield from _speed(report, config)


def _traffic(report: PlanReport, drive_bytes: float) -> Iterator[tuple[str, str]]:
    size, parameters = format_size, max(1, report.parameters)
    least = report.least_traffic_bytes
    if report.traffic is None:
        yield (
            "a step moves",
            (f"{size(least)} at the least (a step has too many instructions to be rehearsed here)"),
        )
    else:
        total = report.traffic.total_bytes
        yield (
            "a step moves",
            (
                f"{size(report.traffic.read_bytes)} read, {size(report.traffic.write_bytes)} "
                f"written: {total / parameters:.1f} bytes a parameter; the bound for this "
                f"memory is {size(least)}, {least / parameters:.1f}"
            ),
        )
    if report.step_write_bytes:
        to_come = report.steps_left * report.step_write_bytes
        parts = [f"{size(report.step_write_bytes)} written a step"]
        parts += [f"{format_wear(report.written_bytes)} so far"] * (report.written_bytes > 0)
        parts += [f"{format_wear(to_come)} to come"] * (to_come > 0)
        lasts = format_count(drive_bytes // report.step_write_bytes)
        share = (report.written_bytes + to_come) / drive_bytes
        yield (
            "wear",
            f"{', '.join(parts)}: {_percent(share)} of what a {drive_bytes / 1e12:g} TBW drive is "
            f"guaranteed to take, which is {lasts} steps",
        )


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"


def _speed(report: PlanReport, config: Config) -> Iterator[tuple[str, str]]:
    if report.machine is None:
        yield "speed", "unknown: the first run on this machine measures its disk and processor"
        if config.train.recompute is None:
            yield (
                "",
                "it then chooses segments that save instead of recomputing, which move more bytes "
                "and reserve more disk than is said here",
            )
        return
    disk = report.machine.disk
    yield (
        "disk speed",
        (
            f"{format_size(disk.read_bytes_per_s)}/s read, {format_size(disk.write_bytes_per_s)}/s "
            f"written, {format_size(disk.mixed_bytes_per_s)}/s both (measured for a moment)"
        ),
    )
    if report.step_s is not None and report.io_s is not None:
        yield (
            "a step takes",
            (
                f"{format_duration(report.step_s)}: {format_duration(report.compute_s)} of "
                f"computing, {format_duration(report.io_s)} of disk; {report.saves} of "
                f"{how_many(len(report.segments), 'segment')} save what the others recompute"
            ),
        )
        if report.steps_left:
            left_s = report.steps_left * report.step_s
            end = datetime.now() + timedelta(seconds=min(left_s, _LONGEST_S))
            yield (
                "the run takes",
                f"{format_duration(left_s)} for {how_many(report.steps_left, 'step')} to come: "
                f"begun now it ends on {end:%Y-%m-%d %H:%M}",
            )
        if report.bound is not None:
            yield "bound by", report.bound
        if report.data_share is not None and report.data_share >= _MUCH_WAITING:
            yield (
                "",
                f"the run's last steps waited for data for {report.data_share:.0%}: that bounds "
                "them, and data.workers makes items beside the computing",
            )
        if report.lag > 1:
            yield "", "a killed run may repeat two segments' backwards for that (store.commit.lag)"
    if report.break_even_tokens is not None:
        yield (
            "break-even",
            (
                f"computing hides the disk above {format_count(report.break_even_tokens)} "
                f"{report.counted} a step; this one has {report.tokens:,}"
            ),
        )
        if report.tokens < report.break_even_tokens and report.counted == "tokens":
            yield "", "raise data.micro_batches to use the processor better"
