"""Shows a comparison with plain PyTorch to a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from swaptrain.verbs.comparison.result import ComparedFigure, JobComparison
from swaptrain.verbs.inspection.difference_table import difference_rows
from swaptrain.verbs.inspection.tensor_table import open_console, plain_table

__all__ = ["show_comparison"]

_MOST_ROWS = 60


def show_comparison(found: JobComparison) -> None:
    """Print the steps, the tensors that differ, and the conclusion."""
    console = open_console()
    left = "step", "figure"
    table = plain_table([*left, "plain PyTorch", "swaptrain", "difference"], left=left)
    for figure in _rows(found.figures):
        if figure is None:
            table.add_row("...")
            continue
        numbers = _number(figure.plain), _number(figure.stored)
        table.add_row(str(figure.step), figure.name, *numbers, _difference(figure))
    console.print(table, highlight=False)
    console.print()
    if found.differing:
        console.print(difference_rows(found.differing), highlight=False)
        console.print()
    if found.agrees:
        console.print(Text(found.conclusion()), soft_wrap=True)


def _rows(figures: Sequence[ComparedFigure]) -> list[ComparedFigure | None]:
    if len(figures) <= _MOST_ROWS:
        return [*figures]
    half = _MOST_ROWS // 2
    return [*figures[:half], None, *figures[-half:]]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


def _difference(figure: ComparedFigure) -> str:
    if figure.is_equal:
        return "equal"
    said = "-" if figure.difference is None else f"{figure.difference:.3g}"
    return f"{said} (last digits)" if figure.agrees else said
