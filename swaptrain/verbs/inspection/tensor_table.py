"""Shows tensors of a run to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from swaptrain.units import how_many
from swaptrain.verbs.inspection.statistics import Histogram, Statistics
from swaptrain.verbs.inspection.tensor_report import (
    FROZEN_SLOT,
    NamedTensors,
    Part,
    TensorPlace,
    TensorReport,
)

__all__ = ["figure", "open_console", "plain_table", "shape_text", "show_one", "show_several"]
__all__ += ["watched"]

_BAR_COLUMNS = 40


def open_console() -> Console:
    """Return the standard output, 110 columns wide where it is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = 110
    return console


@contextmanager
def watched(size_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal of the standard error how much is read; yields what is told of it."""
    console = Console(stderr=True)
    columns = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    shown = console.is_terminal and not console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=size_bytes)
        yield lambda more: progress.advance(task, more)


def show_one(found: NamedTensors) -> None:
    """Print a tensor, its places, its figures and histograms."""
    (tensor,) = found.tensors
    console = open_console()
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in _summary(found, tensor):
        rows.add_row(name, Text(text))
    console.print(rows, highlight=False)
    console.print()
    console.print(_figures(tensor.parts), highlight=False)
    for part in tensor.parts:
        if (
            part.histogram is not None and part.name != "master"
        ):  # that of the weights, but for bits
            console.print()
            console.print(Text(part.name))
            console.print(_histogram(part.histogram), highlight=False)


def show_several(found: NamedTensors) -> None:
    """Print a table of tensors."""
    bad = any(tensor.parts[0].found.not_finite for tensor in found.tensors)
    names = ["name", "shape", "kind", "mean", "std", "norm", *["not finite"] * bad]
    table = plain_table(names, left=("name", "shape", "kind"), fold="name")
    for tensor in found.tensors:
        own = tensor.parts[0].found
        cells = [figure(value) for value in (own.mean, own.std, own.norm)]
        cells += [f"{own.not_finite:,}"] * bad
        table.add_row(Text(tensor.name), shape_text(tensor.shape), tensor.kind, *cells)
    console = open_console()
    console.print(table, highlight=False)
    console.print(
        Text(f"{how_many(len(found.tensors), 'tensor')} of {found.run}, step {found.step}")
    )


def plain_table(names: Sequence[str], *, left: Sequence[str], fold: str = "") -> Table:
    """Return a table without lines; what is not `left` stands at the right, `fold` may wrap."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in names:
        side = "left" if name in left else "right"
        table.add_column(name, justify=side, no_wrap=name != fold, overflow="fold")  # type: ignore[arg-type]
    return table


def shape_text(shape: Sequence[int]) -> Text:
    """Return a shape as text that is no markup."""
    return Text(f"[{', '.join(map(str, shape))}]")


def figure(value: float | None) -> str:
    """Return a number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"


def _summary(found: NamedTensors, tensor: TensorReport) -> Iterator[tuple[str, str]]:
    yield "tensor", tensor.name
    yield "of", f"{found.run}, step {found.step}"
    count = how_many(tensor.parts[0].found.count, "element")
    yield "shape", f"[{', '.join(map(str, tensor.shape))}]: {count} of {tensor.dtype}"
    where = "" if tensor.segment is None else f", segment {tensor.segment} ({tensor.module})"
    yield "kind", f"{tensor.kind}{where}"
    for number, place in enumerate(tensor.places):
        yield "" if number else "lies in", _place(place)


def _place(place: TensorPlace) -> str:
    first, last = place.chunks
    files = f"c/{first}" if first == last else f"c/{first} to c/{last}"
    at = f", {place.dtype}, from element {place.offset:,} on"
    if not place.slot:
        return f"{place.path}: {place.dtype}"
    slot = "the frozen ones" if place.slot == FROZEN_SLOT else f"slot {place.slot}"
    return f"array {place.array} of {slot}{at}: {place.path}/{files}"


def _figures(parts: Sequence[Part]) -> Table:
    """Return a row for each figure, and a column for each part."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column("", no_wrap=True)
    for part in parts:
        table.add_column(Text(part.name), justify="right", overflow="fold")
    table.add_row("stored as", *[part.form for part in parts])

    def row(name: str, cell: Callable[[Statistics], str]) -> None:
        table.add_row(name, *[cell(part.found) for part in parts])

    row("min", lambda own: figure(own.least))
    row("max", lambda own: figure(own.most))
    row("mean", lambda own: figure(own.mean))
    row("std", lambda own: figure(own.std))
    row("norm", lambda own: figure(own.norm))
    row("zeros", lambda own: f"{own.zeros:,}")
    row("NaN", lambda own: f"{own.nan:,}")
    row("infinite", lambda own: f"{own.infinite:,}")
    row("first", lambda own: "\n".join(f"{value:.6g}" for value in own.first))
    row("last", lambda own: "\n".join(f"{value:.6g}" for value in own.last))
    return table


def _histogram(found: Histogram) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    most = max(1, *found.counts)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        bar = ProgressBar(
            total=most,
            completed=count,
            width=_BAR_COLUMNS,
            complete_style="cyan",
            finished_style="cyan",
        )
        table.add_row(figure(low), figure(high), f"{count:,}", bar)
    return table
