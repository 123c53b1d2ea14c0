"""The weights of one step of a run, read in pieces: of its last commit, or of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from swaptrain.errors import ConfigError, DamagedStoreError, RunError
from swaptrain.program.quantized import is_scales, quantized_tensors
from swaptrain.program.roles import Role, role_of, state_array, state_of
from swaptrain.program.tensors import ITEMSIZE, TensorSpec, contiguous
from swaptrain.store.access.lock import LockOwner
from swaptrain.store.format.root import QuantizedRecord, read_buffers
from swaptrain.store.format.state_record import SlotRecord, TableRow
from swaptrain.store.paths import RunPaths
from swaptrain.store.read.export_request import ExportRequest
from swaptrain.store.read.joined_ranges import joined_ranges
from swaptrain.store.read.live_store import LiveStore, look
from swaptrain.store.read.reader import PIECE_ELEMENTS, ChunkReader, read_tensor
from swaptrain.store.read.run_position import Phase, RunPosition, read_position
from swaptrain.store.read.safetensors import StreamedTensor, cast_piece
from swaptrain.store.read.stored_segments import StoredSegment, check_segment
from swaptrain.store.slots.slot import Slot
from swaptrain.store.slots.snapshots import list_snapshots

__all__ = ["StoredStep", "live_store", "reading_bytes", "with_step"]

Result = TypeVar("Result")

_FLOATING = {"float64", "float32", "float16", "bfloat16"}
_TRIES = 5
_READERS = 2
"""Each holds a chunk: of weights, and of the lower halves of their masters."""


def live_store(run: Path) -> LiveStore:
    """Return what is live of a run; raises ConfigError where it is none, or has no commit yet."""
    paths = RunPaths(run)
    if not paths.store.exists() and not paths.config.exists():
        raise ConfigError(f"{run} is not a run directory: it has neither store/ nor config.yaml")
    store = look(run)
    if store is None:
        raise ConfigError(f"{run} has no commit yet: its store was never finished; train it first")
    return store


def with_step(
    run: Path,
    from_step: int | None,
    use: Callable[[StoredStep], Result],
    note: Callable[[str], None],
    verb: str = "export",
) -> Result:
    """Return what `use` makes of the weights of one step.

    With `from_step`: of the snapshot of that step, which lets a trainer go on. Else of a run that
    trains: of the end of the step in progress, where the trainer waits until `use` returns; of any
    other: of its last commit. `use` is called again where the store changed while it read. Raises
    ConfigError; RunError where the run was stopped inside a step; DamagedStoreError.
    """
    if from_step is not None:
        return _with_snapshot(run, from_step, use)
    with ExportRequest(run, note) as request:
        for _ in range(_TRIES):
            owner = request.wait()
            while (view := _view(run, owner, verb)) is None:
                request.renew()
                owner = request.wait()
            try:
                return use(view)
            except DamagedStoreError:
                if not view.store.has_changed():
                    raise
                request.renew()
    raise RunError(
        f"{run} changes while it is read, though no process that does so holds its lock: is it "
        "trained from another machine? Stop that first"
    )


def _with_snapshot(run: Path, step: int, use: Callable[[StoredStep], Result]) -> Result:
    store = look(run)
    snapshots = {snapshot.step: snapshot for snapshot in list_snapshots(run)}
    if store is None or step not in snapshots:
        steps = ", ".join(map(str, snapshots)) or "none"
        raise ConfigError(f"--step {step}: {run} has no snapshot of it; there are: {steps}")
    snapshot = snapshots[step]
    try:
        stored = [
            StoredSegment(one.segment, snapshot.slots.get(one.segment), one.frozen).read()
            for one in store.segments
        ]
        for one in stored:
            check_segment(one, store.root)
            if one.version not in {None, step}:
                raise DamagedStoreError("a snapshot holds another step", segment=one.segment)
        return use(StoredStep(step, replace(store, segments=tuple(stored))))
    except (DamagedStoreError, FileNotFoundError):
        if snapshot.path.exists():
            raise
        raise RunError(
            f"the snapshot of step {step} was dropped while it was read: take a later one"
        ) from None


def reading_bytes(chunk_bytes: int) -> int:
    """Return what it takes to read tensors again and again, beside them: a chunk, and a piece."""
    return chunk_bytes + 4 * PIECE_ELEMENTS


@dataclass(frozen=True)
class _Again:
    """Pieces that can be read again: what gives them is called each time."""

    pieces: Callable[[], Iterator[NDArray[Any]]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return self.pieces()


@dataclass(frozen=True)
class _Source:
    """A slot and its record."""

    slot: Slot
    record: SlotRecord
    readers: dict[tuple[str, str], ChunkReader] = field(default_factory=dict)
    """The last ones, by slot and array, of all sources: neighbours lie in one chunk."""
    verified: dict[tuple[str, str], set[int]] | None = None
    """By slot and array the chunks that have been compared; None where each is read once."""

    def reader(self, array: str) -> ChunkReader:
        key = str(self.slot.path), array
        reader = self.readers.pop(key, None)
        if reader is None:
            reader = self._opened(array)
            while len(self.readers) >= (_READERS if self.verified is None else 1):
                del self.readers[next(iter(self.readers))]
        self.readers[key] = reader
        return reader

    def _opened(self, array: str) -> ChunkReader:
        checksums = self.record.checksums.get(array)
        segment = self.record.segment
        if checksums is None:
            raise DamagedStoreError("an array has no checksums", segment=segment, array=array)
        verified = None
        if self.verified is not None:
            verified = self.verified.setdefault((str(self.slot.path), array), set())
        return ChunkReader(self.slot.array(array), checksums, segment=segment, verified=verified)


@dataclass(frozen=True)
class StoredStep:
    """Every segment's state and frozen parameters, all of one step."""

    step: int
    store: LiveStore
    again: bool = False
    """Whether tensors are read again and again: a chunk is then compared once."""

    @property
    def sources(self) -> Iterator[_Source]:
        readers: dict[tuple[str, str], ChunkReader] = {}
        verified: dict[tuple[str, str], set[int]] | None = {} if self.again else None
        for segment in self.store.segments:
            if segment.state is not None and segment.record is not None:
                yield _Source(segment.state, segment.record, readers, verified)
            if segment.frozen is not None and segment.frozen_record is not None:
                yield _Source(segment.frozen, segment.frozen_record, readers, verified)

    def tensors(self, dtype: str | None) -> Iterator[StreamedTensor]:
        """Yield parameters, floating ones in `dtype` where that is given, and buffers.

        Ranges of experts come as the parameters that they are of.
        """
        return joined_ranges(self._tensors(dtype), self.store.root)

    def _tensors(self, dtype: str | None) -> Iterator[StreamedTensor]:
        for source in self.sources:
            rows = source.record.table
            remainders = {row.name: row for row in rows if role_of(row.array) is Role.REMAINDER}
            stored = self.store.root.quantized
            scales = {row.name: row for row in rows if is_scales(row.array)}
            for row in rows:
                role = role_of(row.array)
                if row.name in stored and role is Role.FROZEN:
                    if not is_scales(row.array):
                        yield _decoded(source, row, scales.get(row.name), stored[row.name], dtype)
                elif role in (Role.WEIGHTS, Role.FROZEN):
                    yield _parameter(source, row, remainders.get(row.name), dtype)
                elif role is Role.BUFFERS:
                    yield _parameter(source, row, None, None)
        for name, value in read_buffers(self.store.run_dir).items():
            yield StreamedTensor(name, value.dtype.name, value.shape, value.nbytes, [value])

    def optimizer(self) -> Iterator[StreamedTensor]:
        """Yield what the optimizer holds of each parameter, as `NAME.exp_avg`, and the step.

        State of 8 bits is decoded to float32.
        """
        return joined_ranges(self._optimizer(), self.store.root)

    def _optimizer(self) -> Iterator[StreamedTensor]:
        for source in self.sources:
            rows = {(row.name, row.array): row for row in source.record.table}
            for row in rows.values():
                if role_of(row.array) is not Role.OPTIMIZER:
                    continue
                state, form = state_of(row.array)
                if form == "8bit":
                    scales = rows[row.name, state_array(state, "scale")]
                    yield _decoded_state(source, row, scales, state)
                elif form != "scale":
                    found = _parameter(source, row, None, None)
                    yield replace(found, name=f"{row.name}.{state}")
        yield StreamedTensor("step", "int64", (), 8, [np.array(self.step, dtype=np.int64)])


def _view(run: Path, owner: LockOwner | None, verb: str) -> StoredStep | None:
    """Look at a store that holds still; None where it is inside a step and `owner` goes on.

    Raises RunError where nobody goes on with the step.
    """
    store = live_store(run)
    position = read_position(RunPaths(run), store.root, store.records)
    if position.damages and store.has_changed():
        return None
    position.decided()
    if position.is_whole and not position.pending:
        return StoredStep(position.done, store)
    if owner is None:
        said = _refusal(run, position, verb)
        snapshots = list_snapshots(run)
        if snapshots:
            said += f"; or take a snapshot with --step {snapshots[-1].step}"
        raise RunError(said)
    return None


def _refusal(run: Path, position: RunPosition, verb: str) -> str:
    """Say why the weights are not those of one step, and what to do."""
    if position.going_back:
        return (
            f"{run} is going back to the snapshot of step {position.done}: run the training "
            f"command to complete that, then {verb}"
        )
    if position.phase is Phase.UPDATE:
        return (
            f"{run} was killed before the update of step {position.step} in "
            f"{len(position.pending)} of its segments, whose clipped gradients wait for it: run "
            "the training command again to go on, or stop it with Ctrl-C, which updates first; "
            f"then {verb}"
        )
    return (
        f"{run} was stopped inside step {position.step}: some of its segments are a step behind "
        f"the others; go on with training until the step is done, then {verb}"
    )


def _parameter(
    source: _Source, row: TableRow, remainder: TableRow | None, dtype: str | None
) -> StreamedTensor:
    tensor = _tensor(row)
    target = dtype if dtype is not None and tensor.dtype in _FLOATING else tensor.dtype

    def pieces() -> Iterator[NDArray[Any]]:
        upper = read_tensor(source.reader(row.array), tensor, row.offset)
        if target == "float32" and remainder is not None:
            rest = read_tensor(source.reader(remainder.array), _tensor(remainder), remainder.offset)
            if remainder.dtype == "float32":  # the whole master
                yield from rest
                return
            for high, low in zip(upper, rest, strict=True):
                yield _join(high, low)
        else:
            for piece in upper:
                yield cast_piece(piece, target, tensor.name)

    return StreamedTensor(
        tensor.name, target, tensor.shape, tensor.numel * ITEMSIZE[target], _Again(pieces)
    )


def _decoded(
    source: _Source,
    codes: TableRow,
    scales: TableRow | None,
    record: QuantizedRecord,
    dtype: str | None,
) -> StreamedTensor:
    """Return a weight that lies as codes: what these stand for, in the dtype of the training."""
    target = dtype or record.dtype
    numel = prod(record.shape)
    weight = TensorSpec(codes.name, record.shape, contiguous(record.shape), record.dtype)
    coded = [*quantized_tensors(weight, record.form).values()]
    found = [_tensor(row) for row in (codes, scales) if row is not None]
    if scales is None or found != coded:
        raise DamagedStoreError(
            f"the codes of {codes.name} are not those of a tensor of {record.shape}",
            segment=source.record.segment,
        )
    tensor, table = found

    def pieces() -> Iterator[NDArray[Any]]:
        from swaptrain.models.quantization import decoded_pieces

        units = read_tensor(source.reader(codes.array), tensor, codes.offset)
        whole = np.concatenate(list(read_tensor(source.reader(scales.array), table, scales.offset)))
        for piece in decoded_pieces(units, whole, record.form, record.shape, record.dtype):
            yield cast_piece(piece, target, codes.name)

    return StreamedTensor(
        codes.name, target, record.shape, numel * ITEMSIZE[target], _Again(pieces)
    )


def _decoded_state(source: _Source, row: TableRow, scales: TableRow, state: str) -> StreamedTensor:
    """Return a state tensor that lies as codes in the order of the parameter's memory."""
    tensor, table = _tensor(row), _tensor(scales)
    flat = TensorSpec(row.name, (tensor.numel,), (1,), row.dtype)

    def in_memory_order() -> Iterator[NDArray[Any]]:
        import torch

        from swaptrain.compute.state_codecs import codec_of, scales_of

        codec = codec_of("8bit")
        assert codec is not None
        found = read_tensor(source.reader(scales.array), table, scales.offset)
        whole, start = torch.from_numpy(np.concatenate([*found])), 0
        for codes in read_tensor(source.reader(row.array), flat, row.offset):
            own = whole[scales_of(slice(start, start + codes.size))]
            out = torch.empty(codes.size)
            arrays = {row.array: torch.from_numpy(codes.copy()), scales.array: own}
            codec.decode(state, arrays, slice(0, codes.size), out)
            start += codes.size
            yield out.numpy()

    def pieces() -> Iterator[NDArray[Any]]:
        if tensor.stride == contiguous(tensor.shape):
            yield from in_memory_order()
            return
        whole = np.concatenate([*in_memory_order()])
        strides = tuple(step * whole.itemsize for step in tensor.stride)
        yield np.lib.stride_tricks.as_strided(whole, tensor.shape, strides).reshape(-1)

    name = f"{row.name}.{state}"
    return StreamedTensor(name, "float32", tensor.shape, 4 * tensor.numel, _Again(pieces))


def _tensor(row: TableRow) -> TensorSpec:
    return TensorSpec(row.name, row.shape, row.stride, row.dtype)


def _join(high: NDArray[Any], low: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 masters whose upper halves, rounded, are `high`: the inverse of split."""
    rounded_up = (low >= 0x8000).astype(np.uint32)
    bits = ((high.view(np.uint16).astype(np.uint32) - rounded_up) << 16) | low
    return bits.view(np.float32)
