"""Shows a person what differs between two runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swaptrain.units import how_many
from swaptrain.verbs.inspection.differences import RunDifference, TensorDifference
from swaptrain.verbs.inspection.tensor_table import figure, open_console, plain_table, shape_text

__all__ = ["difference_rows", "show_difference"]

_MOST_ROWS = 40
_MOST_NAMES = 8
_MOST_SHOWN = 60


def show_difference(found: RunDifference) -> None:
    """Print configs, tensors and names that differ."""
    console = open_console()
    for letter, run, step in zip("AB", found.runs, found.steps, strict=True):
        console.print(Text(f"{letter}: {run}, step {step}"), soft_wrap=True)
    console.print()
    if found.config:
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        for name in ("config key", "A", "B"):
            table.add_column(name, overflow="fold")
        for key, (left, right) in found.config.items():
            table.add_row(*(Text(cell) for cell in (_text(key), _value(left), _value(right))))
        console.print(table, highlight=False)
    else:
        console.print("the configs are equal but for run.dir", highlight=False)
    console.print()
    for letter, names in zip("AB", found.only, strict=True):
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            first = ", ".join(names[:_MOST_NAMES])
            console.print(Text(f"only {letter} has {len(names)}: {first}{more}"))
    _show_tensors(console, found)


def _show_tensors(console: Console, found: RunDifference) -> None:
    if not found.differing:
        what = "of both " if any(found.only) else ""
        said = f"equal bit for bit: {how_many(found.compared, 'tensor')} {what}".rstrip()
        console.print(Text(said if found.compared else "they have no tensor in common"))
        return
    console.print(difference_rows(found.differing), highlight=False)
    equal = found.compared - len(found.differing)
    other = how_many(len(found.differing), "tensor")
    console.print(Text(f"{other} with other bits, {equal} with the same"))


def difference_rows(tensors: Sequence[TensorDifference]) -> Table:
    """Return a table of tensors that differ."""
    left = "tensor", "shape"
    columns = *left, "differing", "of", "largest", "relative"
    table = plain_table(columns, left=left, fold="tensor")
    for one in tensors[:_MOST_ROWS]:
        if one.shapes[0] != one.shapes[1]:
            shapes = Text(" and ").join(map(shape_text, one.shapes))
            table.add_row(Text(one.name), shapes, "-", "-", "-", "-")
            continue
        bad = f" ({one.not_finite:,} not finite)" if one.not_finite else ""
        table.add_row(
            Text(one.name),
            shape_text(one.shapes[0]),
            f"{one.differing:,}{bad}",
            f"{one.elements:,}",
            figure(one.largest),
            figure(one.relative),
        )
    if len(tensors) > _MOST_ROWS:
        table.add_row("...", f"{len(tensors) - _MOST_ROWS} more")
    return table


def _value(value: Any) -> str:
    text = _text(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _text(text: str) -> str:
    """Return text of a file, without what would do something to a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
