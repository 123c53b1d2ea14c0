"""The log of a recorded construction, and the replay of the part of it that one tensor needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from swaptrain.errors import CaptureError

__all__ = ["Log", "LoggedOperation", "Window", "copied", "storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of `tensor`; unique only while that storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass(frozen=True, slots=True)
class Window:
    """What a tensor sees of a storage; it names the tensor's values, whatever object holds them."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Window:
        return cls(
            storage_key(tensor),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that this window shows of `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(storage, self.offset, self.size, self.stride)

    def covers(self, storage_bytes: int) -> bool:
        """Whether each byte of a storage of `storage_bytes` belongs to exactly one element."""
        expected, count = 1, 1
        for size, stride in sorted(
            zip(self.size, self.stride, strict=True), key=lambda pair: (pair[1], pair[0])
        ):
            count *= size
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and count * self.dtype.itemsize == storage_bytes

    def same_layout(self, tensor: torch.Tensor) -> bool:
        return (
            self.size == tuple(tensor.shape)
            and self.stride == tuple(tensor.stride())
            and self.offset == tensor.storage_offset()
            and self.dtype == tensor.dtype
        )


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on a copy of the storage of `tensor`: same bits, same layout."""
    storage: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return Window.of(tensor).on(storage)


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """One logged operation. Its tensor arguments are windows, or small constants."""

    function: OpOverload | Callable[[], torch.Tensor]
    """Without arguments: it gives a value that comes from elsewhere."""
    arguments: tuple[Any, ...]
    """The leaves of (args, kwargs)."""
    structure: TreeSpec
    results: tuple[Window | None, ...]
    """For each leaf of what the operation returns, the window on the storage it creates."""
    reads: frozenset[int]
    """Storages whose earlier content matters; those that are written in part are among them."""
    writes: frozenset[int]
    """Storages with other content afterwards; what is not in `reads` is written in full."""
    generator_state: torch.Tensor | None
    """The state of the generator before the operation drew from it."""
    default_dtype: torch.dtype

    @property
    def storages(self) -> set[int]:
        """All storages that have to exist while the operation runs."""
        mentioned = {leaf.storage for leaf in self.arguments if isinstance(leaf, Window)}
        return mentioned | {window.storage for window in self.results if window is not None}


class Log:
    """Operations in the order in which a construction ran them, found by what they write."""

    def __init__(self) -> None:
        self._operations: list[LoggedOperation | None] = []
        self._storage_bytes: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        self.replayed = 0
        """Operations replayed so far: the price of looking at values during the recording."""

    def __len__(self) -> int:
        return len(self._operations)

    def append(self, operation: LoggedOperation, created_bytes: dict[int, int]) -> None:
        """Add `operation`; `created_bytes` has the size of each storage that it creates."""
        for key in operation.writes:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)
        self._storage_bytes.update(created_bytes)

    def knows(self, key: int) -> bool:
        return key in self._storage_bytes

    def storage_bytes(self, key: int) -> int:
        return self._storage_bytes[key]

    def materialise(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Return the present values of `windows`, bit for bit those of the plain construction.

        Windows of one storage share a storage in the result. Beyond the result, the memory of one
        operation's tensors is used. Neither the global generator nor the modes are disturbed.
        """
        wanted = {window.storage for window in windows}
        positions = self._slice(wanted)
        self.replayed += len(positions)
        storages: dict[int, torch.UntypedStorage] = {}
        dropped = self._dropped_after(positions, wanted)
        with _undisturbed():
            for position in positions:
                self._run(self._operation(position), storages)
                for key in dropped.get(position, ()):
                    del storages[key]
            return [window.on(self._storage(window.storage, storages)) for window in windows]

    def peak_bytes(self, window: Window) -> int:
        """Return how many bytes `materialise` holds at its peak beyond the storage it returns.

        An estimate: what a kernel allocates inside one operation is not in it.
        """
        positions = self._slice({window.storage})
        dropped = self._dropped_after(positions, {window.storage})
        held: set[int] = {window.storage}
        peak = 0
        for position in positions:
            held |= self._operation(position).storages
            peak = max(peak, sum(self._storage_bytes[key] for key in held))
            held.difference_update(dropped.get(position, ()))
        return max(0, peak - self._storage_bytes[window.storage])

    def keep_only(self, windows: Sequence[Window]) -> None:
        """Drop the operations, and states of generators, that no window of `windows` needs."""
        needed = set(self._slice({window.storage for window in windows}))
        for position in range(len(self._operations)):
            if position not in needed:
                self._operations[position] = None

    def _operation(self, position: int) -> LoggedOperation:
        operation = self._operations[position]
        assert operation is not None, "an operation was dropped that a parameter needs"
        return operation

    def _slice(self, wanted: set[int]) -> list[int]:
        """Return the positions of the operations that the content of `wanted` depends on."""
        needed: set[int] = set()
        pending = [(key, len(self._operations)) for key in wanted]
        while pending:
            key, before = pending.pop()
            for position in reversed(self._writers.get(key, ())):
                if position >= before:
                    continue
                # What an operation in `needed` depends on is there already, or pending.
                if position in needed:
                    break
                operation = self._operation(position)
                needed.add(position)
                pending.extend((read, position) for read in operation.reads - {key})
                if key not in operation.reads:
                    break
        return sorted(needed)

    def _dropped_after(self, positions: Sequence[int], kept: set[int]) -> dict[int, list[int]]:
        """For each position, the storages that are not used after it."""
        last_use: dict[int, int] = {}
        for position in positions:
            for key in self._operation(position).storages:
                last_use[key] = position
        dropped: dict[int, list[int]] = {}
        for key, position in last_use.items():
            if key not in kept:
                dropped.setdefault(position, []).append(key)
        return dropped

    def _storage(self, key: int, storages: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        if key not in storages:
            storages[key] = torch.empty(
                self._storage_bytes[key], dtype=torch.uint8, device="cpu"
            ).untyped_storage()
        return storages[key]

    def _run(self, operation: LoggedOperation, storages: dict[int, torch.UntypedStorage]) -> None:
        leaves = []
        for leaf in operation.arguments:
            if isinstance(leaf, Window):
                leaf = leaf.on(self._storage(leaf.storage, storages))
            elif isinstance(leaf, torch.Generator):
                # The caller's own generator must not move: a private one gives the same draws.
                leaf = torch.Generator()
                assert operation.generator_state is not None
                leaf.set_state(operation.generator_state)
            leaves.append(leaf)
        if operation.generator_state is not None:
            torch.default_generator.set_state(operation.generator_state)
        if torch.get_default_dtype() != operation.default_dtype:
            torch.set_default_dtype(operation.default_dtype)
        args, kwargs = tree_unflatten(leaves, operation.structure)
        results = tree_leaves(operation.function(*args, **kwargs))
        for window, result in zip(operation.results, results, strict=True):
            if window is None:
                continue
            if not window.same_layout(result):
                raise CaptureError(
                    f"replaying {operation.function} gave a tensor of shape "
                    f"{tuple(result.shape)}, strides {tuple(result.stride())}, where the "
                    f"recording foresaw {window.size}, {window.stride}; build the module with "
                    "recording switched off"
                )
            storages[window.storage] = result.untyped_storage()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Run the body without modes and without gradients; restore the generator and default dtype."""
    default_dtype = torch.get_default_dtype()
    state = torch.default_generator.get_state()
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            torch.set_default_dtype(default_dtype)
