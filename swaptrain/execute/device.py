"""The compute device: where the tensors of slabs are computed with."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swaptrain.errors import ConfigError, RunError
from swaptrain.program.instructions import ObjectKey

__all__ = ["ComputeDevice", "CpuDevice", "CudaDevice", "open_device"]


class ComputeDevice(Protocol):
    """Brings views of slabs to where they are computed with, and back."""

    device: torch.device

    def pin(self, address: int, nbytes: int) -> None:
        """Make a slab's memory fit for direct copies."""

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo `pin`."""

    def begin(self, segment: int) -> None:
        """The following instructions belong to `segment`: copies of others may go."""

    def fetch(self, key: ObjectKey, name: str, view: Tensor, *, read: bool = True) -> Tensor:
        """Return `view`, or its copy on the device; without `read` its content is undefined."""

    def put(self, view: Tensor, tensor: Tensor) -> None:
        """Write a tensor that `fetch` gave back into its slab."""

    def forget(self, key: ObjectKey) -> None:
        """The object is dead: drop its copies."""

    def synchronize(self) -> None:
        """Wait until what was put is in the slabs."""

    def peak_bytes(self) -> int | None:
        """Return the most device memory held since the last call, None where there is none."""


class CpuDevice:
    """Computes on the slabs themselves: nothing is copied."""

    device = torch.device("cpu")

    def pin(self, address: int, nbytes: int) -> None:
        """Nothing is copied, so nothing is pinned."""

    def unpin(self, address: int, nbytes: int) -> None:
        """Nothing was pinned."""

    def begin(self, segment: int) -> None:
        """Nothing is kept."""

    def fetch(self, key: ObjectKey, name: str, view: Tensor, *, read: bool = True) -> Tensor:
        """Return the view."""
        return view

    def put(self, view: Tensor, tensor: Tensor) -> None:
        """Nothing moves: the tensor is the view."""

    def forget(self, key: ObjectKey) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def peak_bytes(self) -> int | None:
        """There is no device memory."""
        return None


class CudaDevice:
    """Copies pinned slabs to the device on a stream of its own, and keeps a segment's copies.

    The copies of a segment stay for all micro-batches of its turn, so weights and accumulators
    cross the bus once per visit.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: dict[tuple[ObjectKey, str], Tensor] = {}
        self._segment = -1
        if budget_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            if budget_bytes > total:
                raise ConfigError(
                    f"memory.device is {budget_bytes >> 20} MiB, the device has {total >> 20} MiB: "
                    "set memory.device to less"
                )
            torch.cuda.set_per_process_memory_fraction(budget_bytes / total, device)

    def pin(self, address: int, nbytes: int) -> None:
        """Register a slab with CUDA, so that copies are direct and asynchronous."""
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status):
            raise RunError(
                f"CUDA cannot pin {nbytes >> 20} MiB of memory (error {int(status)}): raise the "
                "limit of locked memory (ulimit -l), or lower memory.host"
            )

    def unpin(self, address: int, nbytes: int) -> None:
        """Take a slab's registration back; its mapping goes next."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def begin(self, segment: int) -> None:
        """Drop the copies of the segment before."""
        if segment != self._segment:
            self._copies.clear()
            self._segment = segment

    def fetch(self, key: ObjectKey, name: str, view: Tensor, *, read: bool = True) -> Tensor:
        """Copy the view to the device unless its copy is there."""
        copy = self._copies.get((key, name))
        if copy is None:
            copy = torch.empty_strided(
                view.shape, view.stride(), dtype=view.dtype, device=self.device
            )
            if read:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self._stream):
                    copy.copy_(view, non_blocking=True)
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
                copy.record_stream(self._stream)
            self._copies[key, name] = copy
        return copy

    def put(self, view: Tensor, tensor: Tensor) -> None:
        """Copy a device tensor into its slab, behind what computes it."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            view.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)

    def forget(self, key: ObjectKey) -> None:
        """Drop the copies of a dead object."""
        for entry in [entry for entry in self._copies if entry[0] == key]:
            del self._copies[entry]

    def synchronize(self) -> None:
        """Wait for the copy stream: the slabs may be written to disk then."""
        self._stream.synchronize()

    def peak_bytes(self) -> int | None:
        """Return the peak of torch's allocator and reset it."""
        peak = torch.cuda.max_memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(peak)


def open_device(name: str, budget_bytes: int | None) -> ComputeDevice:
    """Return the device that the config names; `auto` is CUDA where it exists.

    Raises ConfigError when the device is not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if budget_bytes is not None:
            raise ConfigError(
                "memory.device is set, but the device is a CPU, which has no memory of its own: "
                "remove memory.device"
            )
        return CpuDevice()
    if not torch.cuda.is_available():
        raise ConfigError(f"device is {name}, but there is no CUDA device: set device to cpu")
    device = torch.device("cuda" if name == "auto" else name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name}, but there are only {torch.cuda.device_count()} CUDA devices"
        )
    return CudaDevice(torch.device("cuda", device.index or 0), budget_bytes)
