"""A compute device with memory of its own: copies of slabs come and go beside the computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swaptrain.compute.object_tensors import once
from swaptrain.errors import ConfigError, RunError
from swaptrain.memory.malloc import AllocatorBytes
from swaptrain.memory.pinned import PinnedPool
from swaptrain.program.instructions import ObjectKey
from swaptrain.spans import spanned

__all__ = ["CudaStreams", "StreamDevice", "Streams"]


class Streams(Protocol):
    """The queues of a device: one that computes, one for copies to it, one for copies from it.

    Queues run beside each other, and beside the host, in the order of each one alone. A mark is a
    place in them.
    """

    device: torch.device
    limit_bytes: int
    """What may be allocated on the device."""

    def empty(self, view: Tensor) -> Tensor:
        """Return memory of the device, laid out like `view`, with undefined content."""

    def bring(self, target: Tensor, view: Tensor, behind: Sequence[Any]) -> Any:
        """Copy a slab's view to the device, after what is computed so far; return a mark.

        After these copies from the device too, which put there what the view shows. `target` has
        the view's shape.
        """

    def compute_behind(self, mark: Any) -> None:
        """Let what is computed from now on wait for a copy to the device."""

    def send(self, view: Tensor, source: Tensor) -> Any:
        """Copy a tensor of the device to the host, after what is computed; return a mark.

        The view has its shape.
        """

    def host_copy(self, source: Tensor) -> Tensor:
        """Return memory of the host in the shape of `source`, with undefined content."""

    def compute_mark(self) -> Any:
        """Return a mark after all that is computed so far."""

    def mark(self) -> Any:
        """Return a mark after all that was begun, computing included."""

    def wait(self, mark: Any) -> None:
        """Let the host wait for a mark that `mark` returned."""

    def seconds(self, first: Any, last: Any) -> float | None:
        """Return the seconds between a mark of the computing and one of all, when both are past.

        None where nobody measures them.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Make memory fit for direct copies."""

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo `pin`."""

    def peak_bytes(self) -> int:
        """Return the most memory held since the last call."""

    def allocator_bytes(self) -> AllocatorBytes | None:
        """Return what torch's allocator of the device holds now."""

    def give_back_cached(self) -> None:
        """Give the allocator's free blocks back to the device."""


@dataclass
class _Copy:
    tensor: Tensor  # the shape and strides of the slab's view
    mark: Any = None
    """Of the copying, as long as nothing that is computed waits for it."""


@dataclass(eq=False)
class _Submitted:
    """What was begun on the device up to a mark."""

    mark: Any
    first: Any
    """A mark before the computing of its instruction; None where there was none."""
    views: list[Tensor]
    """Of slabs that are copied: as long as they are here, no slab goes or moves."""
    sent: int
    """Copies from the device so far."""


@dataclass
class _Sent:
    """A copy from the device that nobody has waited for."""

    number: int
    begin: int
    end: int
    """Addresses."""
    mark: Any


class StreamDevice:
    """Computes on copies of slabs; those of the segment that comes next come while one computes.

    The copies of a segment stay for all micro-batches of a visit, so weights and accumulators
    cross the bus once. Nothing waits for the device until `wait` or `synchronize`.
    """

    overlaps = True

    def __init__(self, streams: Streams) -> None:
        self.device = streams.device
        self._streams = streams
        self._views: list[Tensor] = []
        self._begun: list[_Submitted] = []
        self._first: Any = None
        self._sent: deque[_Sent] = deque()
        self._count = 0
        self._segment = self._next = -1
        self._copies: dict[tuple[ObjectKey, str], _Copy] = {}
        self._ahead: dict[tuple[ObjectKey, str], _Copy] = {}
        """Of the segment `_next`."""

    @property
    def ahead_bytes(self) -> int:
        """What an instruction and what is copied ahead of the next one may take together.

        Seven eighths: nobody counts blocks of updates, libraries' workspaces, and what rounding and
        fragments of the allocator take.
        """
        return self._streams.limit_bytes - self._streams.limit_bytes // 8

    def pool(self, budget_bytes: int, *, useful_bytes: int | None = None) -> PinnedPool:
        """Return a pool of slabs that copies reach directly.

        It takes all of its memory at once: a quarter more than is of use, for what the plan leaves
        to reads ahead and for holes.
        """
        if useful_bytes is not None:
            budget_bytes = min(budget_bytes, useful_bytes + useful_bytes // 4)
        return PinnedPool(budget_bytes, self._streams.pin, self._streams.unpin)

    def begin(self, segment: int) -> None:
        """Drop the copies of the segment before; take over those that were made ahead."""
        self._first = self._streams.compute_mark()
        if segment != self._segment:
            self._copies = self._ahead if segment == self._next else {}
            self._ahead, self._next, self._segment = {}, -1, segment

    def has(self, segment: int, key: ObjectKey, name: str) -> bool:
        """Whether the copy that an instruction of `segment` needs is there, or on its way."""
        if segment == self._segment:
            return (key, name) in self._copies
        return segment == self._next and (key, name) in self._ahead

    def fetch_ahead(self, segment: int, key: ObjectKey, name: str, view: Tensor) -> bool:
        """Begin to copy what an instruction of `segment` reads, after the one that runs.

        The view has to stay as it is until the host has waited. False where the device has no room.
        """
        if segment not in (self._segment, self._next):
            self._ahead, self._next = {}, segment
        copies = self._copies if segment == self._segment else self._ahead
        if (key, name) not in copies:
            try:
                copy = self._streams.empty(view)
            except torch.OutOfMemoryError:
                return False
            copies[key, name] = _Copy(copy, self._bring(copy, view))
        return True

    def fetch(self, key: ObjectKey, name: str, view: Tensor, *, read: bool = True) -> Tensor:
        """Copy the view to the device unless its copy is there."""
        found = self._copies.get((key, name))
        if found is None:
            copy = self._streams.empty(view)
            mark = self._bring(copy, view) if read else None
            found = self._copies[key, name] = _Copy(copy, mark)
        if found.mark is not None:
            self._streams.compute_behind(found.mark)
            found.mark = None
        return found.tensor

    def put(self, view: Tensor, tensor: Tensor) -> None:
        """Copy a tensor into its slab; it has to stay as it is until the host has waited."""
        self._send(view, tensor)

    def store(self, view: Tensor, tensor: Tensor) -> None:
        """Copy what was computed into a slab; it has to stay as it is until the host has waited."""
        self._send(*once(view, tensor.detach()))

    def bring_back(self, tensor: Tensor) -> Tensor:
        """Return a small tensor on the host, where its content is after the next mark."""
        copy = self._streams.host_copy(tensor)
        self._send(copy, tensor.detach())
        return copy

    def forget(self, key: ObjectKey) -> None:
        """Drop the copies of a dead object."""
        for entry in [entry for entry in self._copies if entry[0] == key]:
            del self._copies[entry]

    def mark(self) -> _Submitted:
        """Return what `wait` waits for: all that was begun."""
        begun = _Submitted(self._streams.mark(), self._first, self._views, self._count)
        self._first, self._views = None, []
        self._begun.append(begun)
        return begun

    @spanned("wait for the device")
    def wait(self, begun: _Submitted) -> float | None:
        """Wait for a mark: what was begun before it is in the slabs, which may change then.

        Return the seconds in which its instruction was computed, where they are measured.
        """
        self._streams.wait(begun.mark)
        while begun in self._begun:
            self._begun.pop(0).views.clear()
        while self._sent and self._sent[0].number <= begun.sent:
            self._sent.popleft()
        return None if begun.first is None else self._streams.seconds(begun.first, begun.mark)

    def synchronize(self) -> bool:
        """Wait for all that was begun; say whether slabs were held for it."""
        held = bool(self._views) or any(begun.views for begun in self._begun)
        self.wait(self.mark())
        return held

    def _send(self, view: Tensor, tensor: Tensor) -> None:
        self._views.append(view)
        self._count += 1
        mark = self._streams.send(view, tensor)
        self._sent.append(_Sent(self._count, *_addresses(view), mark))

    def _bring(self, copy: Tensor, view: Tensor) -> Any:
        self._views.append(view)
        begin, end = _addresses(view)
        behind = [sent.mark for sent in self._sent if sent.begin < end and begin < sent.end]
        return self._streams.bring(*once(copy, view), behind)

    def peak_bytes(self) -> int | None:
        """Return the most memory of the device held since the last call."""
        return self._streams.peak_bytes()

    def allocator_bytes(self) -> AllocatorBytes | None:
        """Return what torch's allocator of the device holds."""
        return self._streams.allocator_bytes()

    def give_back_cached(self) -> None:
        """Give its free blocks back, once nothing is under way."""
        self.synchronize()
        self._streams.give_back_cached()


def _addresses(view: Tensor) -> tuple[int, int]:
    """Return where the memory of a view begins and ends."""
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    elements = last + 1 if view.numel() else 0
    return view.data_ptr(), view.data_ptr() + elements * view.element_size()


class CudaStreams:
    """The queues and the memory of one CUDA device. torch gives these calls no types."""

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        total = int(torch.cuda.get_device_properties(device).total_memory)
        self.limit_bytes = budget_bytes or int(torch.cuda.mem_get_info(device)[0])
        if budget_bytes is not None:
            if budget_bytes > total:
                raise ConfigError(
                    f"memory.device is {budget_bytes >> 20} MiB, the device has {total >> 20} MiB: "
                    "set memory.device to less"
                )
            torch.cuda.set_per_process_memory_fraction(budget_bytes / total, device)
        self._most_allocated_bytes = 0
        """Until the last call of `peak_bytes`."""

    def empty(self, view: Tensor) -> Tensor:
        """Return memory of the device, laid out like `view`, with undefined content."""
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=self.device)

    def bring(
        self, target: Tensor, view: Tensor, behind: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        """Copy a slab's view to the device, after what is computed so far; return a mark."""
        # The target's memory may be used until there by what was computed with it before.
        self._in.wait_stream(torch.cuda.current_stream(self.device))
        for sent in behind:
            self._in.wait_event(sent)
        with torch.cuda.stream(self._in):
            target.copy_(view, non_blocking=True)
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(self._in)
        target.record_stream(self._in)
        return mark

    def compute_behind(self, mark: torch.cuda.Event) -> None:
        """Let what is computed from now on wait for a copy to the device."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def send(self, view: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy a tensor of the device to the host, after what is computed so far; return a mark.

        Where they lie otherwise, or have gaps, torch copies by way of memory of its own, which is
        not pinned: then the host has to wait.
        """
        begin, end = _addresses(view)
        direct = view.stride() == source.stride() and end - begin == view.nbytes
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            view.copy_(source, non_blocking=direct)
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(self._out)
        source.record_stream(self._out)
        return mark

    def host_copy(self, source: Tensor) -> Tensor:
        """Return pinned memory of torch's own for a tensor of the device."""
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=True)

    def compute_mark(self) -> torch.cuda.Event:
        """Return a mark after all that is computed so far."""
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def mark(self) -> tuple[torch.cuda.Event, ...]:
        """Return a mark after all that was begun, computing included."""
        streams = torch.cuda.current_stream(self.device), self._in, self._out
        # The host sleeps while it waits: I/O threads need its cores.
        events = tuple(torch.cuda.Event(blocking=True, enable_timing=True) for _ in streams)  # type: ignore[no-untyped-call]
        for event, stream in zip(events, streams, strict=True):
            event.record(stream)
        return events

    def wait(self, mark: tuple[torch.cuda.Event, ...]) -> None:
        """Let the host wait for a mark."""
        for event in mark:
            event.synchronize()

    def seconds(self, first: torch.cuda.Event, last: tuple[torch.cuda.Event, ...]) -> float:
        """Return the seconds between a mark of the computing and one of all."""
        return float(first.elapsed_time(last[0])) / 1000

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory with CUDA, so that copies are direct and asynchronous."""
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status):
            raise RunError(
                f"CUDA cannot pin {nbytes >> 20} MiB of memory (error {int(status)}): raise the "
                "limit of locked memory (ulimit -l), or lower memory.host"
            )

    def unpin(self, address: int, nbytes: int) -> None:
        """Take the registration back, before the memory goes or becomes less."""
        with suppress(torch.AcceleratorError):  # a device that failed has nothing under way
            torch.cuda.synchronize(self.device)
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def peak_bytes(self) -> int:
        """Return the peak of torch's allocator and reset it."""
        peak = torch.cuda.max_memory_reserved(self.device)
        self._most_allocated_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(peak)

    def allocator_bytes(self) -> AllocatorBytes:
        """Return the counts of torch's caching allocator."""
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
        return AllocatorBytes(
            int(allocated["current"]), int(reserved["current"]), self._most_allocated_bytes
        )

    def give_back_cached(self) -> None:
        """Empty torch's cache."""
        torch.cuda.empty_cache()
