"""Prints the layers of a model, the largest first, and what could be otherwise in them."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table

from swaptrain.units import format_count, format_duration, format_size
from swaptrain.verbs.plans.bound import bounding
from swaptrain.verbs.plans.layer_hints import layer_hints
from swaptrain.verbs.plans.layers import Layer, layers
from swaptrain.verbs.plans.planned import Planned

__all__ = ["hints_of", "layers_of", "print_layers"]

_MOST_ROWS, _MOST_NAMES = 40, 4
_NAME_COLUMNS = 28
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""A part of a module's name that is a number."""


def layers_of(found: Planned) -> list[Layer]:
    """Return the layers of the model that is trained, the largest first."""
    narrow = found.config.data.micro_batches == 1 and found.config.model.dtype == "bfloat16"
    itemsize = 2 if narrow and not found.made.builder.deferred else 4
    prepared = found.prepared
    return layers(prepared.built.uncut, prepared.rules, gradient_itemsize=itemsize)


def hints_of(found: Planned, rows: list[Layer]) -> list[tuple[str, str]]:
    """Return (module, hint), those of the graph first; a hint of the whole model has no module."""
    hints = layer_hints(
        found.prepared.built.uncut,
        rows,
        on_gpu=found.prepared.device.device.type == "cuda",
        channels_last=found.config.train.channels_last,
    )
    step_s, io_s = found.price.step_s, found.io_s
    if step_s is None or io_s is None:
        return hints
    if bounding(io_s, found.price.compute_s, step_s) == "disk":
        factor = io_s / max(found.price.compute_s, 1e-9)
        hints.append(
            (
                "",
                f"the disk works for {format_duration(io_s)} of a step and computing takes "
                f"{format_duration(found.price.compute_s)}: a batch of up to {factor:.1f} times "
                "as many micro-batches costs little time (data.micro_batches)",
            )
        )
    return hints


def print_layers(found: Planned, console: Console) -> None:
    """Print the table and the hints below it; layers that are alike share a row."""
    rows = layers_of(found)
    groups = _alike(rows)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("layer", overflow="ellipsis", no_wrap=True, max_width=_NAME_COLUMNS)
    table.add_column("count", justify="right", no_wrap=True)
    for name in ("parameters", "trained", "weights", "gradients", "state", "activations", "flops"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, members in groups[:_MOST_ROWS]:
        table.add_row(*_cells(name, members[0], len(members)))
    if rest := [one for _, members in groups[_MOST_ROWS:] for one in members]:
        table.add_row(*_cells("the rest together", _sum(rest), len(rest)))
    table.add_row(*_cells("all together", _sum(rows), len(rows)))
    console.print(table, markup=False, highlight=False)
    for hint, modules in _gathered(hints_of(found, rows)).items():
        shown = ", ".join(modules[:_MOST_NAMES])
        more = f" and {len(modules) - _MOST_NAMES} more" if len(modules) > _MOST_NAMES else ""
        console.print(f"{shown}{more}: {hint}", markup=False, highlight=False, soft_wrap=True)


def _alike(rows: list[Layer]) -> list[tuple[str, list[Layer]]]:
    """Return rows whose names differ in numbers alone and whose figures are the same, together.

    `*` stands for the numbers that differ.
    """
    groups: dict[tuple[object, ...], list[Layer]] = {}
    for one in rows:
        figures = one.figures()
        del figures["name"]
        key = _NUMBER.sub("*", one.name), *figures.values()
        groups.setdefault(key, []).append(one)
    found = []
    for (name, *_), members in groups.items():
        alone = members[0].name if len(members) == 1 else str(name)
        found.append((alone or "(the model)", members))
    return found


def _gathered(hints: list[tuple[str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, text in hints:
        names.setdefault(text, []).append(name or "all")
    return names


def _cells(name: str, one: Layer, count: int) -> list[str]:
    return [
        name,
        str(count),
        format_count(one.parameters),
        "all" if one.trained == one.parameters else format_count(one.trained),
        format_size(one.weight_bytes),
        format_size(one.gradient_bytes),
        format_size(one.state_bytes),
        format_size(one.activation_bytes),
        format_count(one.flops),
    ]


def _sum(rows: list[Layer]) -> Layer:
    total = Layer("")
    for one in rows:
        for name, value in one.figures().items():
            if name != "name":
                setattr(total, name, getattr(total, name) + value)
    return total
