"""The verb `inspect`: shows a person what a run directory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swaptrain.config.schema import Config
from swaptrain.store.format.root import AdapterRecord
from swaptrain.units import format_duration, format_size, how_many
from swaptrain.verbs.inspection.report import RunReport, SegmentRow, read_run

__all__ = ["inspect_run", "summary"]

_MOST_ROWS = 48
_COLUMNS = 36


def inspect_run(path: Path, *, named: Path | None = None, console: Console | None = None) -> None:
    """Show a run's config, progress, segments and last metrics; works on a running run too.

    Of several ranks `named` is the run, and `path` what all of them have together.

    Raises ConfigError for what is no run, DamagedStoreError for a record that does not verify.
    """
    report = read_run(path)
    if named is not None and named != path:
        report = replace(report, path=named)
    console = console or Console()
    if not console.is_terminal:
        console.width = 110
    rows = Table.grid(padding=(0, 2))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, text in summary(report):
        rows.add_row(name, text)
    console.print(rows, markup=False, highlight=False)
    if report.segments:
        console.print(_segment_table(report.segments), highlight=False)
    if report.rows:
        console.print(_metrics_table(report.rows), highlight=False)


def summary(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield what a run is and where it stands: names, and a text for each."""
    config = report.config
    yield "run", str(report.path)
    base = "" if config.model.base is None else f", frozen weights as {config.model.base}"
    yield "model", f"{_model(config)}, {config.model.dtype}{base}"
    if report.origin is not None:
        yield "began from", report.origin
    if report.root is not None and report.root.adapter is not None:
        yield "adapter", _adapter(report.root.adapter)
    if report.root is not None and report.root.choices.trained is not None:
        yield "trained", report.root.choices.trained
    yield "data", _data(config)
    yield (
        "optimizer",
        (
            f"{config.optimizer.name}, lr {config.optimizer.lr:g} {config.optimizer.schedule.name}"
            + (
                f", gradients clipped to {config.optimizer.clip_norm:g}"
                if config.optimizer.clip_norm is not None
                else ""
            )
        ),
    )
    yield "memory.host", format_size(config.memory.host)
    yield "progress", report.state
    if report.rows:
        last = report.rows[-1]
        yield "", f"last line of metrics: step {last.get('step')}, loss {_number(last, 'loss')}"
    for row in report.snapshots:
        own = f"{format_size(row.own_bytes)} of its own" if row.own_bytes else "shares its slots"
        yield "snapshot", f"step {row.step}: {own}"
    yield "process", f"training ({report.writer})" if report.writer else "none has the run open"
    yield "disk", format_size(report.disk_bytes)


def _model(config: Config) -> str:
    if config.model.python is not None:
        return config.model.python
    source = config.model.hf
    if isinstance(source, dict):
        return str(source.get("model_type"))
    return str(source)


def _adapter(record: AdapterRecord) -> str:
    fields = record.fields
    kind = "DoRA" if fields["use_dora"] else "rsLoRA" if fields["use_rslora"] else "LoRA"
    scale = f"{fields['lora_alpha']:g} / {'sqrt(' if fields['use_rslora'] else ''}{fields['r']}"
    scale += ")" if fields["use_rslora"] else ""
    layers = how_many(len(record.merges), "layer")
    return f"{kind}, r {fields['r']}, scaled by {scale}, on {layers} of the base"


def _data(config: Config) -> str:
    data = config.data
    named = data.text or data.chat or data.tokens or data.python
    shown = named if isinstance(named, str) else ", ".join(str(name) for name in named or ())
    items = "items" if data.python is not None else f"sequences of {data.sequence_length}"
    return f"{shown}; {data.micro_batches} x {data.micro_batch} {items} a step"


def _segment_table(segments: tuple[SegmentRow, ...]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("segment", "module", "tensors", "version", "slot", "MiB"):
        right = name in ("tensors", "version", "MiB")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    hidden = range(_MOST_ROWS // 2, len(segments) - _MOST_ROWS // 2)
    for number, row in enumerate(segments):
        if len(segments) > _MOST_ROWS and number in hidden:
            if number == hidden[0]:
                table.add_row("...", f"{len(hidden)} more")
            continue
        module = row.module if len(row.module) <= _COLUMNS else row.module[: _COLUMNS - 3] + "..."
        table.add_row(
            str(row.index),
            module,
            str(row.parameters),
            "-" if row.version is None else str(row.version),
            row.slot,
            f"{row.size_bytes / 2**20:,.1f}",
        )
    return table


def _metrics_table(rows: tuple[dict[str, Any], ...]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for name in ("step", "loss", "lr", "step time", "wait", "read", "written", "roofline"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.get("step")),
            _number(row, "loss"),
            f"{row.get('lr') or 0:.3g}",
            format_duration(row.get("step_s") or 0.0),
            format_duration(row.get("io_wait_s") or 0.0),
            format_size(row.get("read_bytes") or 0),
            format_size(row.get("write_bytes") or 0),
            _number(row, "roofline_fraction", digits=2),
        )
    return table


def _number(row: dict[str, Any], name: str, digits: int = 4) -> str:
    value = row.get(name)
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"
