"""The compute device: where the tensors of slabs are computed with."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
import torch.utils.deterministic
from torch import Tensor

from swaptrain.compute.copy_streams import CudaStreams, StreamDevice
from swaptrain.compute.object_tensors import copy_into
from swaptrain.errors import ConfigError
from swaptrain.memory.malloc import AllocatorBytes, heap_bytes, trim
from swaptrain.memory.pages import PagePool
from swaptrain.memory.slab import SlabPool
from swaptrain.program.instructions import ObjectKey

__all__ = ["ComputeDevice", "CpuDevice", "choose_kernels", "load_libraries", "open_device"]


class ComputeDevice(Protocol):
    """Brings views of slabs to where they are computed with, and back."""

    device: torch.device

    @property
    def ahead_bytes(self) -> int:
        """What an instruction and what is copied ahead of the next one may take together.

        0 where nothing is copied.
        """

    def pool(self, budget_bytes: int, *, useful_bytes: int | None = None) -> SlabPool:
        """Return a pool of slabs that can be brought and put.

        `useful_bytes` are those of all that will ever be in it: it need not be much larger.
        """

    def begin(self, segment: int) -> None:
        """The following instructions belong to `segment`: copies of others may go."""

    def has(self, segment: int, key: ObjectKey, name: str) -> bool:
        """Whether an instruction of `segment`, this one or the next, need not bring it."""

    def fetch_ahead(self, segment: int, key: ObjectKey, name: str, view: Tensor) -> bool:
        """Begin to bring what an instruction of `segment` reads, after the one that runs.

        False where there is no room for it.
        """

    def fetch(self, key: ObjectKey, name: str, view: Tensor, *, read: bool = True) -> Tensor:
        """Return `view`, or its copy on the device, in the view's shape and strides.

        Without `read` its content is undefined.
        """

    def put(self, view: Tensor, tensor: Tensor) -> None:
        """Write a tensor that `fetch` gave back into its slab; it stays as it is until `wait`."""

    def store(self, view: Tensor, tensor: Tensor) -> None:
        """Write a tensor that was computed into a slab; it stays as it is until `wait`.

        The view has its shape.
        """

    def forget(self, key: ObjectKey) -> None:
        """The object is dead: drop its copies."""

    @property
    def overlaps(self) -> bool:
        """Whether it computes beside the host, which may begin what comes next meanwhile."""

    def bring_back(self, tensor: Tensor) -> Tensor:
        """Return a small tensor on the host, where its content is after the next mark."""

    def mark(self) -> Any:
        """Return what `wait` waits for: all that was begun."""

    def wait(self, begun: Any) -> float | None:
        """Wait until what was put before a mark is in the slabs.

        Return the seconds in which the device computed the instruction; None where it is the host.
        """

    def synchronize(self) -> bool:
        """Wait for all that was begun; say whether slabs were held for it."""

    def peak_bytes(self) -> int | None:
        """Return the most device memory held since the last call, None where there is none."""

    def allocator_bytes(self) -> AllocatorBytes | None:
        """Return what the allocator of what is computed holds: torch's, or on a CPU malloc."""

    def give_back_cached(self) -> None:
        """Give free blocks of that allocator back to the system, between two instructions."""


class CpuDevice:
    """Computes on the slabs themselves: nothing is copied."""

    device = torch.device("cpu")
    overlaps = False

    @property
    def ahead_bytes(self) -> int:
        """Nothing is copied."""
        return 0

    def pool(self, budget_bytes: int, *, useful_bytes: int | None = None) -> PagePool:
        """Nothing is copied, so slabs may take over each other's pages."""
        return PagePool(budget_bytes)

    def begin(self, segment: int) -> None:
        """Nothing is kept."""

    def has(self, segment: int, key: ObjectKey, name: str) -> bool:
        """Nothing is brought."""
        return True

    def fetch_ahead(self, segment: int, key: ObjectKey, name: str, view: Tensor) -> bool:
        """Nothing is copied."""
        return True

    def fetch(self, key: ObjectKey, name: str, view: Tensor, *, read: bool = True) -> Tensor:
        """Return the view."""
        return view

    def put(self, view: Tensor, tensor: Tensor) -> None:
        """Nothing moves: the tensor is the view."""

    def store(self, view: Tensor, tensor: Tensor) -> None:
        """Copy the tensor."""
        copy_into(view, tensor)

    def forget(self, key: ObjectKey) -> None:
        """Nothing is kept."""

    def bring_back(self, tensor: Tensor) -> Tensor:
        """It is on the host."""
        return tensor

    def mark(self) -> None:
        """Nothing is under way."""

    def wait(self, begun: None) -> None:
        """Nothing is under way."""

    def synchronize(self) -> bool:
        """Nothing is under way."""
        return False

    def peak_bytes(self) -> int | None:
        """There is no device memory."""
        return None

    def allocator_bytes(self) -> AllocatorBytes | None:
        """Return what malloc holds: torch has no cache of its own here."""
        return heap_bytes()

    def give_back_cached(self) -> None:
        """Give the heap's free pages back; it keeps what is freed later."""
        trim()


def choose_kernels(device: torch.device, *, deterministic: bool, benchmark: bool = False) -> None:
    """Let torch use only kernels whose sums have one order, where they do not have to anyway.

    Or, with `benchmark`, the kernels of convolutions that are fastest in a trial of each shape.

    For the whole process, and before anything is computed on the device: cuBLAS is told by the
    environment, which it reads when it begins. See "Reproducibility" in torch's notes.
    """
    if benchmark and device.type == "cpu":
        raise ConfigError("train.cudnn_benchmark is of GPUs, and device is cpu: set it to false")
    torch.backends.cudnn.benchmark = benchmark
    if device.type == "cpu" or not deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Whoever reads what nobody has written would read the same each time: here nobody does.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def load_libraries(device: torch.device) -> None:
    """Compute a little, so that the device's libraries are in memory, which are in no budget.

    They come with the first product, and stay: hundreds of MiB of RAM that would be taken for what
    the first segment needs. Raises ConfigError where the device has no memory.
    """
    if device.type == "cpu":
        # At its first backward autograd starts a thread for each device. Without a GPU, torch's
        # CUDA build claims eight of them once a model was captured, and then no forked process
        # may use autograd: so the first backward comes before that.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        return
    try:
        for dtype in (torch.float32, torch.bfloat16):
            ones = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
            (gradient,) = torch.autograd.grad((ones @ ones).sum(), ones)
            float(gradient.sum())  # waits
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device has no memory for the smallest product ({str(error).splitlines()[0]}): "
            "set memory.device to more, or end other programs that use the device"
        ) from error


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
    return StreamDevice(CudaStreams(torch.device("cuda", device.index or 0), budget_bytes))
