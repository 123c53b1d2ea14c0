"""`inspect RUN NAME`: a tensor of one step of a run, where it lies and what its elements are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

from swaptrain.errors import ConfigError
from swaptrain.program.quantized import is_scales
from swaptrain.program.roles import Role, role_of, state_of
from swaptrain.program.tensors import ITEMSIZE
from swaptrain.store.format.state_record import SlotRecord, TableRow
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.safetensors import StreamedTensor
from swaptrain.store.slots.slot import Slot
from swaptrain.units import how_many
from swaptrain.verbs.inspection.statistics import histogram, statistics
from swaptrain.verbs.inspection.tensor_report import (
    FROZEN_SLOT,
    NamedTensors,
    Part,
    TensorPlace,
    TensorReport,
)
from swaptrain.verbs.inspection.tensor_table import show_one, show_several, watched
from swaptrain.verbs.stored_step import StoredStep, with_step

__all__ = ["inspect_tensors", "read_tensors"]

_NEAREST = 3


def inspect_tensors(
    run: Path,
    name: str,
    *,
    from_step: int | None = None,
    as_json: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Print the tensor of that name, or a table of those that a glob means.

    Raises ConfigError where there is none, and what `with_step` raises.
    """
    found = read_tensors(run, name, from_step=from_step, note=note)
    if as_json:
        trees = [tensor.tree() for tensor in found.tensors]
        content = {"tensors": trees} if found.is_glob else trees[0]
        print(json.dumps({"run": found.run, "step": found.step, **content}, allow_nan=False))
    elif found.is_glob:
        show_several(found)
    else:
        show_one(found)


def read_tensors(
    run: Path,
    name: str,
    *,
    from_step: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> NamedTensors:
    """Return the figures of a tensor, with its state; of what a glob means those of weights alone.

    Elements are read in pieces: memory holds a chunk and a piece. Raises as `inspect_tensors`.
    """

    def use(view: StoredStep) -> NamedTensors:
        weights = {tensor.name: tensor for tensor in view.tensors(None)}
        chosen = _chosen(run, name, list(weights))
        if name in weights:
            whole = _report(view, weights[name], whole=True)
            return NamedTensors(str(run), view.step, (whole,), is_glob=False)
        size_bytes = sum(weights[one].nbytes for one in chosen)
        with watched(size_bytes) as read:
            reports = []
            for one in chosen:
                reports.append(_report(view, weights[one], whole=False))
                read(weights[one].nbytes)
        return NamedTensors(str(run), view.step, tuple(reports), is_glob=True)

    return with_step(run, from_step, use, note, "inspect")


def _chosen(run: Path, name: str, names: Sequence[str]) -> list[str]:
    """Return the names that one name or glob means; raises ConfigError where that are none."""
    if name in names:
        return [name]
    found = [one for one in names if fnmatchcase(one, name)]
    if found:
        return found
    shown = f"'{ascii(name)[1:-1]}'"
    said = f"{run} has no tensor {shown}"
    if has_magic(name):
        said = f"{run}: no name matches {shown}"
    if Path(name).is_dir():
        said += ", and the directory of that name is no run"
    inside = [one for one in names if name in one]
    if inside:
        raise ConfigError(
            f"{said}; it is part of {how_many(len(inside), 'name')}: ask for '*{name}*'"
        )
    near = get_close_matches(name.strip("*"), names, n=_NEAREST, cutoff=0.0)
    raise ConfigError(f"{said}; the nearest are {', '.join(near) or 'none'}, '*' shows all")


def _report(view: StoredStep, weights: StreamedTensor, *, whole: bool) -> TensorReport:
    """Return a tensor's figures; the `whole` has those of its state, and histograms."""
    name = weights.name
    found = [(slot, record, row) for slot, record, row in _rows(view) if row.name == name]
    found.sort(key=lambda one: role_of(one[2].array).is_for_updates)  # the weights first
    own = [row for *_, row in found if role_of(row.array) not in (Role.OPTIMIZER, Role.REMAINDER)]
    segment = found[0][1].segment if found else None
    modules = {row.segment: row.module for row in view.store.root.segments}
    quantized = view.store.root.quantized.get(name)
    form = own[0].dtype if own else weights.dtype
    if quantized is not None:
        form = f"{quantized.form} codes and scales"
    streams = [("weights", form, weights)]
    if whole:
        streams += _state(view, name, [row for *_, row in found])
    return TensorReport(
        name=name,
        shape=weights.shape,
        dtype=weights.dtype,
        kind=_kind(own[0]) if own else "constant buffer",
        segment=segment,
        module=None if segment is None else modules.get(segment),
        places=tuple(_place(slot, row) for slot, _, row in found) or _constant(view, name, weights),
        parts=tuple(_part(*stream, whole=whole) for stream in streams),
    )


def _rows(view: StoredStep) -> Iterator[tuple[Slot, SlotRecord, TableRow]]:
    for one in view.store.segments:
        for slot, record in ((one.state, one.record), (one.frozen, one.frozen_record)):
            if slot is not None and record is not None:
                yield from ((slot, record, row) for row in record.table)


def _state(
    view: StoredStep, name: str, rows: Sequence[TableRow]
) -> Iterator[tuple[str, str, StreamedTensor]]:
    """Yield the float32 master and what the optimizer holds: name, form on the disk, elements."""
    for row in rows:
        if role_of(row.array) is Role.REMAINDER:
            master = next(one for one in view.tensors("float32") if one.name == name)
            joined = "float32" if row.dtype == "float32" else "bfloat16 + remainder"
            yield "master", joined, master
    held = {tensor.name: tensor for tensor in view.optimizer()}
    for row in rows:
        if role_of(row.array) is not Role.OPTIMIZER:
            continue
        state, form = state_of(row.array)
        if form != "scale":
            said = "8-bit codes and scales" if form == "8bit" else row.dtype
            yield state, said, held[f"{name}.{state}"]


def _kind(row: TableRow) -> str:
    role = role_of(row.array)
    return {Role.WEIGHTS: "trained", Role.FROZEN: "frozen"}.get(role, "buffer")


def _place(slot: Slot, row: TableRow) -> TensorPlace:
    files = slot.array(row.array)
    chunk_elements = files.chunk_bytes // ITEMSIZE[files.dtype]
    last = row.offset + max(row.extent, 1) - 1
    is_state = role_of(row.array) is not Role.FROZEN and not is_scales(row.array)
    return TensorPlace(
        array=row.array,
        dtype=row.dtype,
        slot=slot.id if is_state else FROZEN_SLOT,
        offset=row.offset,
        path=str(files.path.resolve()),
        chunks=(row.offset // chunk_elements, last // chunk_elements),
    )


def _constant(view: StoredStep, name: str, tensor: StreamedTensor) -> tuple[TensorPlace, ...]:
    """Return the place of a buffer that no step changes: an array of its own."""
    path = RunPaths(view.store.run_dir).buffers / name
    return (TensorPlace(name, tensor.dtype, "", 0, str(path.resolve()), (0, 0)),)


def _part(name: str, form: str, tensor: StreamedTensor, *, whole: bool) -> Part:
    found = statistics(tensor.pieces)
    drawn = histogram(tensor.pieces, found) if whole else None
    return Part(name, tensor.dtype, form, found, drawn)
