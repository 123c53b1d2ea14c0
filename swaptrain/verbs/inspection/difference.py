"""`inspect RUN_A RUN_B`: what differs between two runs, in their configs and in their tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swaptrain.config.load import load_config
from swaptrain.errors import ConfigError, DamagedStoreError
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.safetensors import StreamedTensor
from swaptrain.verbs.inspection.difference_table import show_difference
from swaptrain.verbs.inspection.differences import RunDifference, TensorDifference
from swaptrain.verbs.inspection.statistics import BLOCK_ELEMENTS, flat, json_number
from swaptrain.verbs.inspection.tensor_table import watched
from swaptrain.verbs.stored_step import StoredStep, with_step

__all__ = ["compare_pieces", "full_tensors", "inspect_difference", "is_run", "read_difference"]


def is_run(path: Path) -> bool:
    """Whether a path is a run directory: it has a store or a config."""
    paths = RunPaths(path)
    return path.is_dir() and (paths.store.exists() or paths.config.exists())


def inspect_difference(
    run_a: Path,
    run_b: Path,
    *,
    from_step: int | None = None,
    as_json: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Print what differs between two runs. Raises ConfigError and what `with_step` raises."""
    found = read_difference(run_a, run_b, from_step=from_step, note=note)
    if as_json:
        print(json.dumps(found.tree(), allow_nan=False))
    else:
        show_difference(found)


def read_difference(
    run_a: Path,
    run_b: Path,
    *,
    from_step: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> RunDifference:
    """Compare parameters and buffers of the last step of both, or of the snapshots of one step.

    Parameters are compared as their float32 masters where they have them. Tensors are read in
    pieces. Raises ConfigError where both are one run, and as `with_step`.
    """
    if run_a.resolve() == run_b.resolve():
        raise ConfigError(f"{run_a} and {run_b} are the same run directory: name two")

    def both(a: StoredStep, b: StoredStep) -> RunDifference:
        left, right = full_tensors(a), full_tensors(b)
        shared = [name for name in left if name in right]
        size_bytes = sum(left[name].nbytes + right[name].nbytes for name in shared)
        differing = []
        with watched(size_bytes) as read:
            for name in shared:
                one = _compared(left[name], right[name])
                if one is not None:
                    differing.append(one)
                read(left[name].nbytes + right[name].nbytes)
        return RunDifference(
            runs=(str(run_a), str(run_b)),
            steps=(a.step, b.step),
            config=_config_differences(run_a, run_b),
            compared=len(shared),
            differing=tuple(sorted(differing, key=TensorDifference.order)),
            only=(
                tuple(name for name in left if name not in right),
                tuple(name for name in right if name not in left),
            ),
        )

    def with_a(a: StoredStep) -> RunDifference:
        return with_step(run_b, from_step, lambda b: both(a, b), note, "inspect")

    return with_step(run_a, from_step, with_a, note, "inspect")


def full_tensors(view: StoredStep) -> dict[str, StreamedTensor]:
    """Return all parameters and buffers by name, none narrower than the run has it.

    Parameters of 16 bits are those that their float32 masters say.
    """
    own = {tensor.name: tensor for tensor in view.tensors(None)}
    wide = {tensor.name: tensor for tensor in view.tensors("float32")}
    return {name: own[name] if own[name].dtype == "float64" else wide[name] for name in own}


def compare_pieces(
    name: str,
    shape: tuple[int, ...],
    one: Iterable[NDArray[Any]],
    other: Iterable[NDArray[Any]],
    dtypes: tuple[str, str],
) -> TensorDifference | None:
    """Return by how much two tensors of a shape differ; None where all bits are equal."""
    count = differing = not_finite = 0
    largest = apart = size = 0.0
    for left, right in _in_step(one, other):
        count += len(left)
        unequal = _unequal(left, right)
        differing += int(np.count_nonzero(unequal))
        values = flat(left).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = float(values @ values)
            if not math.isfinite(squares):
                squares = float(values[np.isfinite(values)] @ values[np.isfinite(values)])
            size += squares
            if not unequal.any():
                continue
            between = flat(right).astype(np.float64) - values
            good = np.isfinite(between)
            not_finite += int(np.count_nonzero(~good & np.isfinite(values)))
            not_finite += int(np.count_nonzero(~np.isfinite(values) & _spread(unequal, values)))
            if good.any():
                largest = max(largest, float(np.abs(between[good]).max()))
                apart += float(between[good] @ between[good])
    if not differing:
        return None
    relative = json_number(math.sqrt(apart / size)) if size else None
    return TensorDifference(
        name, (shape, shape), dtypes, count, differing, largest, relative, not_finite
    )


def _compared(one: StreamedTensor, other: StreamedTensor) -> TensorDifference | None:
    dtypes = one.dtype, other.dtype
    if one.shape != other.shape:
        return TensorDifference(one.name, (one.shape, other.shape), dtypes)
    return compare_pieces(one.name, one.shape, one.pieces, other.pieces, dtypes)


def _unequal(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which elements have other bits; of two dtypes, those of the same float64 numbers."""
    if left.dtype != right.dtype:
        left, right = left.astype(np.float64), right.astype(np.float64)
    width = left.dtype.itemsize
    bits = [np.ascontiguousarray(side).view(np.uint8).reshape(-1, width) for side in (left, right)]
    if width in (1, 2, 4, 8):
        words = [side.view(f"u{width}").reshape(-1) for side in bits]
        return np.asarray(words[0] != words[1])
    return np.asarray((bits[0] != bits[1]).any(axis=1))


def _spread(unequal: NDArray[np.bool_], values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the same for the numbers of elements, of which a complex one has two."""
    return unequal if len(unequal) == len(values) else np.repeat(unequal, 2)


def _in_step(
    one: Iterable[NDArray[Any]], other: Iterable[NDArray[Any]]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield pieces of both that have as many elements, in one dimension."""
    others, other_piece = iter(other), np.empty(0)
    for given in one:
        piece = np.ascontiguousarray(given).reshape(-1)
        while len(piece):
            if not len(other_piece):
                found = next(others, None)
                if found is None:
                    raise DamagedStoreError("a tensor has fewer elements than its shape")
                other_piece = np.ascontiguousarray(found).reshape(-1)
            count = min(len(piece), len(other_piece), BLOCK_ELEMENTS)
            yield piece[:count], other_piece[:count]
            piece, other_piece = piece[count:], other_piece[count:]


def _config_differences(run_a: Path, run_b: Path) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, but for `run.dir`; None stands for what is not set."""
    left, right = (_leaves(load_config(RunPaths(run).config).to_tree()) for run in (run_a, run_b))
    keys = [*left, *(key for key in right if key not in left)]
    return {
        key: (left.get(key), right.get(key))
        for key in keys
        if key != "run.dir" and left.get(key) != right.get(key)
    }


def _leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            found.update(_leaves(value, f"{name}."))
        else:
            found[name] = value
    return found
