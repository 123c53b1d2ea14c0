"""The weights of a run's last commit as one safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.program.tensors import ITEMSIZE, TensorSpec
from swaptrain.store.bfloat16 import numpy_dtype
from swaptrain.store.live import held_segments
from swaptrain.store.lock import RunLock
from swaptrain.store.reader import ChunkReader, read_tensor
from swaptrain.store.root import read_buffers, read_root, segments_directory
from swaptrain.store.safetensors import StreamedTensor, write_safetensors
from swaptrain.store.slots import Slot
from swaptrain.store.state_record import read_kept

__all__ = ["export_weights"]

_FLOATING = {"float64", "float32", "float16", "bfloat16"}


def export_weights(run: Path, to: Path, dtype: str | None, *, lock: bool = True) -> None:
    """Write the weights and buffers of the last commit to `to`, a few chunks in memory at a time.

    Parameters keep the dtype that they were trained in, unless `dtype` says otherwise; `float32`
    joins the two halves of split masters. Tied weights are written once, under their first name.
    Takes the run's lock (unless the caller has it). Raises ConfigError when `run` is not a run or
    has no store yet, or `to` cannot be a file; RunError when the run is training, stopped inside a
    step, or the disk is full; DamagedStoreError.
    """
    if to.is_dir():
        raise ConfigError(f"--to {to} is a directory: name a file in it")
    if not to.absolute().parent.is_dir():
        raise ConfigError(f"--to {to}: there is no directory {to.absolute().parent}")
    if not (run / "store").exists() and not (run / "config.yaml").exists():
        raise ConfigError(f"{run} is not a run directory: it has neither store/ nor config.yaml")
    if read_root(run) is None:
        raise ConfigError(f"{run} has no commit yet: its store was never finished; train it first")
    with RunLock(run) if lock else nullcontext():
        tensors = {tensor.name: tensor for tensor in _tensors(run, dtype)}
        write_safetensors(to, list(tensors.values()))


@dataclass(frozen=True)
class _Source:
    """A slot and its record."""

    slot: Slot
    record: dict[str, Any]

    def reader(self, array: str) -> ChunkReader:
        checksums = self.record["checksums"].get(array)
        segment = self.record["segment"]
        if checksums is None:
            raise DamagedStoreError("an array has no checksums", segment=segment, array=array)
        return ChunkReader(self.slot.array(array), checksums, segment=segment)


def _tensors(run: Path, dtype: str | None) -> Iterator[StreamedTensor]:
    sources = _sources(run)
    for source in sources:
        rows = source.record["table"]
        remainders = {row["name"]: row for row in rows if row["array"] == "remainder"}
        for row in rows:
            kind = row["array"].partition("_")[0]
            if kind in {"weights", "frozen"}:
                yield _parameter(source, row, remainders.get(row["name"]), dtype)
            elif kind == "buffers":
                yield _parameter(source, row, None, None)
    for name, value in read_buffers(run).items():
        yield StreamedTensor(name, value.dtype.name, value.shape, value.nbytes, [value])


def _sources(run: Path) -> list[_Source]:
    """Return every segment's state and frozen parameters; all state is of one version."""
    root = read_root(run)
    assert root is not None
    sources, versions = [], {}
    for held in held_segments(run, root):
        if held.state is not None and held.record is not None:
            versions[held.segment] = held.record["version"]
            sources.append(_Source(held.state, held.record))
        if held.frozen is not None and held.frozen_record is not None:
            sources.append(_Source(held.frozen, held.frozen_record))
    if not sources:
        raise DamagedStoreError("the store has no segments", path=segments_directory(run))
    if len(set(versions.values())) > 1:
        raise RunError(
            f"{run} was stopped inside step {max(versions.values())}: some of its segments are a "
            "step behind the others; go on with training until the step is done, then export"
        )
    if root.commit_every == 1 and all(_is_pending(run, k, v) for k, v in versions.items()):
        step = max(versions.values()) + 1
        raise RunError(
            f"{run} was killed before the update of step {step}, whose clipped gradients wait for "
            "it: run the training command again to go on, or stop it with Ctrl-C, which updates "
            "first; then export"
        )
    return sources


def _is_pending(run: Path, segment: int, version: int) -> bool:
    """Whether the gradient of the step after `version` is done and waits for its update."""
    try:
        record = read_kept(run / "spill" / "kept" / f"{segment:03d}" / "record.json")
    except DamagedStoreError:
        return False  # there is none, or the writing of it was cut short
    return int(record["version"]) == version + 1


def _parameter(
    source: _Source, row: dict[str, Any], remainder: dict[str, Any] | None, dtype: str | None
) -> StreamedTensor:
    tensor = TensorSpec(row["name"], tuple(row["shape"]), tuple(row["stride"]), row["dtype"])
    target = dtype if dtype is not None and tensor.dtype in _FLOATING else tensor.dtype

    def pieces() -> Iterator[NDArray[Any]]:
        upper = read_tensor(source.reader(row["array"]), tensor, row["offset"])
        if target == "float32" and remainder is not None:
            lower = TensorSpec(tensor.name, tensor.shape, tensor.stride, "uint16")
            rest = read_tensor(source.reader("remainder"), lower, remainder["offset"])
            for high, low in zip(upper, rest, strict=True):
                yield _join(high, low)
        else:
            for piece in upper:
                yield piece.astype(numpy_dtype(target), copy=False)

    return StreamedTensor(
        tensor.name, target, tensor.shape, tensor.numel * ITEMSIZE[target], pieces()
    )


def _join(high: NDArray[Any], low: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 masters whose upper halves, rounded, are `high`: the inverse of split."""
    rounded_up = (low >= 0x8000).astype(np.uint32)
    bits = ((high.view(np.uint16).astype(np.uint32) - rounded_up) << 16) | low
    return bits.view(np.float32)
