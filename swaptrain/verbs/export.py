"""The weights of a run's last step: a file, an adapter, or a merged model; also while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from swaptrain.config.load import Config, load_config
from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.program.quantized import is_scales, quantized_tensors
from swaptrain.program.roles import Role, role_of
from swaptrain.program.tensors import ITEMSIZE, TensorSpec, contiguous
from swaptrain.store.access.lock import LockOwner
from swaptrain.store.format.origin import read_origin
from swaptrain.store.format.root import QuantizedRecord, RootRecord, read_buffers
from swaptrain.store.format.state_record import SlotRecord, TableRow
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.export_request import ExportRequest
from swaptrain.store.read.held_segments import Held, check_held
from swaptrain.store.read.live_store import LiveStore, look
from swaptrain.store.read.reader import ChunkReader, read_tensor
from swaptrain.store.read.run_position import Phase, RunPosition, read_position
from swaptrain.store.read.safetensors import StreamedTensor, cast_piece, write_safetensors
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.snapshots import list_snapshots
from swaptrain.units import format_size
from swaptrain.verbs.export_adapter import adapter_of, merged_tensors, write_adapter
from swaptrain.verbs.model_directory import (
    MOST_SHARD_BYTES,
    DirectoryFacts,
    check_model_directory,
    write_model_directory,
)

if TYPE_CHECKING:
    from swaptrain.models.hub_names import HubNames

__all__ = ["SUFFIX", "Form", "export_weights"]

Form = Literal["all", "adapter", "merged"]
SUFFIX = ".safetensors"
"""Of the name of a file of weights; a name without it is a directory's."""
_FLOATING = {"float64", "float32", "float16", "bfloat16"}
_TRIES = 5
_READERS = 2
"""Each holds a chunk: of weights, and of the lower halves of their masters."""


def export_weights(
    run: Path,
    to: Path,
    dtype: str | None,
    *,
    form: Form = "all",
    from_step: int | None = None,
    shard_bytes: int = MOST_SHARD_BYTES,
    state: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> int:
    """Write the weights and buffers of one step to `to`, a few chunks in memory at a time.

    The forms `all`, and `merged` of a run with adapters: to a file, by the names that the run has,
    or to a directory as the hub has it, by the names there, with config and tokenizer, in files of
    at most `shard_bytes`. `adapter`: to a directory as PEFT writes it. With `state` what the
    optimizer holds of each parameter is written too, and the step.

    Returns the step, of which `note` hears too.

    Of a run that trains: of the end of the step in progress, where the trainer waits until they are
    read. Of any other: of its last commit. With `from_step`: of the snapshot of that step, which
    lets a trainer go on. Parameters keep the dtype that they were trained in, in a directory that
    of the checkpoint the run began from, unless `dtype` says otherwise; `float32` joins the two
    halves of split masters. Tied weights are written once, under their first name. Raises
    ConfigError when `run` is not a run or has no store yet, or `to` cannot be a file; RunError when
    the run was stopped inside a step, or the disk is full; DamagedStoreError.
    """
    if state and form != "all":
        raise ConfigError(f"--state belongs to the run's own weights, and not to --{form}")
    to = to.resolve()  # a link stays one
    if not to.parent.is_dir():
        raise ConfigError(f"--to {to}: there is no directory {to.parent}")
    if to.is_dir() and to.suffix == SUFFIX:
        raise ConfigError(f"--to {to} is a directory: name a file in it")
    is_taken = to.exists() and (not to.is_dir() or any(to.iterdir()))
    if is_taken and form != "adapter" and to.suffix != SUFFIX:
        raise ConfigError(f"--to {to}: it exists and is not empty: name a new directory")
    paths = RunPaths(run)
    if not paths.store.exists() and not paths.config.exists():
        raise ConfigError(f"{run} is not a run directory: it has neither store/ nor config.yaml")
    store = look(run)
    if store is None:
        raise ConfigError(f"{run} has no commit yet: its store was never finished; train it first")
    write = _writer(run, to, dtype, form, store.root, shard_bytes, note, state=state)
    if from_step is not None:
        return _export_snapshot(run, from_step, write)
    with ExportRequest(run, note) as request:
        for _ in range(_TRIES):
            owner = request.wait()
            while (view := _view(run, owner)) is None:
                request.renew()
                owner = request.wait()
            try:
                return write(view)
            except DamagedStoreError:
                if not view.store.has_changed():
                    raise
                request.renew()
    raise RunError(
        f"{run} changes while it is read, though no process that does so holds its lock: is it "
        "trained from another machine? Stop that first"
    )


def _export_snapshot(run: Path, step: int, write: Callable[[_View], int]) -> int:
    store = look(run)
    snapshots = {snapshot.step: snapshot for snapshot in list_snapshots(run)}
    if store is None or step not in snapshots:
        steps = ", ".join(map(str, snapshots)) or "none"
        raise ConfigError(f"--from-step {step}: {run} has no snapshot of it; there are: {steps}")
    snapshot = snapshots[step]
    try:
        held = [
            Held(one.segment, snapshot.slots.get(one.segment), one.frozen).read()
            for one in store.segments
        ]
        for one in held:
            check_held(one, store.root)
            if one.version not in {None, step}:
                raise DamagedStoreError("a snapshot holds another step", segment=one.segment)
        return write(_View(step, replace(store, segments=tuple(held))))
    except (DamagedStoreError, FileNotFoundError):
        if snapshot.path.exists():
            raise
        raise RunError(
            f"the snapshot of step {step} was dropped while it was read: take a later one"
        ) from None


def _writer(
    run: Path,
    to: Path,
    dtype: str | None,
    form: Form,
    root: RootRecord,
    shard_bytes: int,
    note: Callable[[str], None],
    *,
    state: bool,
) -> Callable[[_View], int]:
    """Return what writes a form of one step and returns the step. Raises ConfigError.

    What is wrong about the request is found before anything is read.
    """
    adapter = None if form == "all" else adapter_of(run, root.adapter, f"--{form}")
    is_directory = form != "adapter" and to.suffix != SUFFIX
    if is_directory and form == "all" and root.adapter is not None:
        raise ConfigError(
            f"--to {to}: {run} trains adapters: give --merged --to DIR for a model with them in "
            "it, or --adapter DIR for the adapter alone"
        )
    config, names = None, None
    if is_directory:
        config = load_config(RunPaths(run).config)
        check_model_directory(to, config)
        names = _hub_names(run, config, root)
        if form == "all":
            dtype = dtype or names.dtype
        dtype = dtype or config.model.dtype

    def write(view: _View) -> int:
        def tensors(dtype: str | None) -> dict[str, StreamedTensor]:
            return {tensor.name: tensor for tensor in _tensors(run, view, dtype)}

        if form == "adapter":
            assert adapter is not None
            count, size_bytes = (
                len(adapter.names),
                write_adapter(to, adapter, tensors(dtype or "float32")),
            )
        else:
            found = list(tensors(dtype).values())
            if adapter is not None:
                found = merged_tensors(adapter, tensors(dtype), tensors("float32"))
            count = len(found)
            held = list(_optimizer(view)) if state else []
            count += len(held)
            if config is None or names is None:
                named = [replace(tensor, name=f"optimizer.{tensor.name}") for tensor in held]
                size_bytes = write_safetensors(to, found + named)
            else:
                assert dtype is not None
                vocabulary = None
                if config.model.resize_to_tokenizer:
                    vocabulary = names.grown_vocabulary(found)
                found = names.as_on_hub(found, dtype)
                described = DirectoryFacts(config, root.choices.model, vocabulary)
                size_bytes = write_model_directory(to, found, described, shard_bytes, held)
        note(
            f"wrote {to}: {count:,} tensors, {format_size(size_bytes)}, as they are after step "
            f"{view.step}"
        )
        return view.step

    return write


def _hub_names(run: Path, config: Config, root: RootRecord) -> HubNames:
    from swaptrain.models.hub_names import HubNames

    if root.choices.model is None:
        raise ConfigError(
            "the run does not say which class of transformers it trains: write its tensors with "
            "--to FILE.safetensors"
        )
    return HubNames(config, root.choices.model, read_origin(run))


@dataclass(frozen=True)
class _Source:
    """A slot and its record."""

    slot: Slot
    record: SlotRecord
    readers: dict[tuple[str, str], ChunkReader] = field(default_factory=dict)
    """The last ones, by slot and array, of all sources: neighbours lie in one chunk."""

    def reader(self, array: str) -> ChunkReader:
        key = str(self.slot.path), array
        reader = self.readers.pop(key, None)
        if reader is None:
            reader = self._opened(array)
            while len(self.readers) >= _READERS:
                del self.readers[next(iter(self.readers))]
        self.readers[key] = reader
        return reader

    def _opened(self, array: str) -> ChunkReader:
        checksums = self.record.checksums.get(array)
        segment = self.record.segment
        if checksums is None:
            raise DamagedStoreError("an array has no checksums", segment=segment, array=array)
        return ChunkReader(self.slot.array(array), checksums, segment=segment)


@dataclass(frozen=True)
class _View:
    """Every segment's state and frozen parameters, all of one step."""

    step: int
    store: LiveStore

    @property
    def sources(self) -> Iterator[_Source]:
        readers: dict[tuple[str, str], ChunkReader] = {}
        for segment in self.store.segments:
            if segment.state is not None and segment.record is not None:
                yield _Source(segment.state, segment.record, readers)
            if segment.frozen is not None and segment.frozen_record is not None:
                yield _Source(segment.frozen, segment.frozen_record, readers)


def _view(run: Path, owner: LockOwner | None) -> _View | None:
    """Look at a store that holds still; None where it is inside a step and `owner` goes on.

    Raises RunError where nobody goes on with the step.
    """
    store = look(run)
    if store is None:
        raise ConfigError(f"{run} has no commit yet: its store was never finished; train it first")
    position = read_position(RunPaths(run), store.root, store.records)
    if position.damages and store.has_changed():
        return None
    position.decided()
    if position.is_whole and not position.pending:
        return _View(position.done, store)
    if owner is None:
        refusal = _refusal(run, position)
        snapshots = list_snapshots(run)
        if snapshots:
            refusal += f"; or take a snapshot with --from-step {snapshots[-1].step}"
        raise RunError(refusal)
    return None


def _refusal(run: Path, position: RunPosition) -> str:
    """Say why the weights are not those of one step, and what to do."""
    if position.going_back:
        return (
            f"{run} is going back to the snapshot of step {position.done}: run the training "
            "command to complete that, then export"
        )
    if position.phase is Phase.UPDATE:
        return (
            f"{run} was killed before the update of step {position.step} in "
            f"{len(position.pending)} of its segments, whose clipped gradients wait for it: run "
            "the training command again to go on, or stop it with Ctrl-C, which updates first; "
            "then export"
        )
    return (
        f"{run} was stopped inside step {position.step}: some of its segments are a step behind "
        "the others; go on with training until the step is done, then export"
    )


def _tensors(run: Path, view: _View, dtype: str | None) -> Iterator[StreamedTensor]:
    for source in view.sources:
        rows = source.record.table
        remainders = {row.name: row for row in rows if role_of(row.array) is Role.REMAINDER}
        stored = view.store.root.quantized
        scales = {row.name: row for row in rows if is_scales(row.array)}
        for row in rows:
            role = role_of(row.array)
            if row.name in stored and role is Role.FROZEN:
                if not is_scales(row.array):
                    yield _decoded(source, row, scales[row.name], stored[row.name], dtype)
            elif role in (Role.WEIGHTS, Role.FROZEN):
                yield _parameter(source, row, remainders.get(row.name), dtype)
            elif role is Role.BUFFERS:
                yield _parameter(source, row, None, None)
    for name, value in read_buffers(run).items():
        yield StreamedTensor(name, value.dtype.name, value.shape, value.nbytes, [value])


def _optimizer(view: _View) -> Iterator[StreamedTensor]:
    """Yield what the optimizer holds of each parameter, as `NAME.exp_avg`, and the step."""
    for source in view.sources:
        for row in source.record.table:
            if role_of(row.array) is Role.OPTIMIZER:
                found = _parameter(source, row, None, None)
                yield replace(found, name=f"{row.name}.{row.array}")
    yield StreamedTensor("step", "int64", (), 8, [np.array(view.step, dtype=np.int64)])


def _parameter(
    source: _Source, row: TableRow, remainder: TableRow | None, dtype: str | None
) -> StreamedTensor:
    tensor = TensorSpec(row.name, row.shape, row.stride, row.dtype)
    target = dtype if dtype is not None and tensor.dtype in _FLOATING else tensor.dtype

    def pieces() -> Iterator[NDArray[Any]]:
        upper = read_tensor(source.reader(row.array), tensor, row.offset)
        if target == "float32" and remainder is not None:
            lower = TensorSpec(tensor.name, tensor.shape, tensor.stride, "uint16")
            rest = read_tensor(source.reader(Role.REMAINDER.value), lower, remainder.offset)
            for high, low in zip(upper, rest, strict=True):
                yield _join(high, low)
        else:
            for piece in upper:
                yield cast_piece(piece, target, tensor.name)

    return StreamedTensor(
        tensor.name, target, tensor.shape, tensor.numel * ITEMSIZE[target], pieces()
    )


def _decoded(
    source: _Source, codes: TableRow, scales: TableRow, record: QuantizedRecord, dtype: str | None
) -> StreamedTensor:
    """Return a weight that lies as codes: what these stand for, in the dtype of the training."""
    target = dtype or record.dtype
    numel = prod(record.shape)
    weight = TensorSpec(codes.name, record.shape, contiguous(record.shape), record.dtype)
    lengths = [stored.numel for stored in quantized_tensors(weight, record.form).values()]
    if lengths != [prod(codes.shape), prod(scales.shape)]:
        raise DamagedStoreError(
            f"the codes of {codes.name} are not those of a tensor of {record.shape}",
            segment=source.record.segment,
        )
    tensor = TensorSpec(codes.name, codes.shape, codes.stride, codes.dtype)
    table = TensorSpec(scales.name, scales.shape, scales.stride, scales.dtype)

    def pieces() -> Iterator[NDArray[Any]]:
        from swaptrain.models.quantization import decoded_pieces

        found = read_tensor(source.reader(codes.array), tensor, codes.offset)
        whole = np.concatenate(list(read_tensor(source.reader(scales.array), table, scales.offset)))
        for piece in decoded_pieces(found, whole, record.form, record.shape, record.dtype):
            yield cast_piece(piece, target, codes.name)

    return StreamedTensor(codes.name, target, record.shape, numel * ITEMSIZE[target], pieces())


def _join(high: NDArray[Any], low: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 masters whose upper halves, rounded, are `high`: the inverse of split."""
    rounded_up = (low >= 0x8000).astype(np.uint32)
    bits = ((high.view(np.uint16).astype(np.uint32) - rounded_up) << 16) | low
    return bits.view(np.float32)
