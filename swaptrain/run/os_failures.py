"""What the operating system and the allocator refuse during a run, said in words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from swaptrain.config.schema import Config
from swaptrain.errors import RunError, SwaptrainError
from swaptrain.store.disk.durable_files import disk_errors
from swaptrain.units import format_size

__all__ = ["named_failures", "out_of_memory"]

_DEVICE_FAILURES = "CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "CUSOLVER_STATUS_"
"""In the text of a RuntimeError that has no class of its own: what torch's libraries report."""


@contextmanager
def named_failures(config: Config) -> Iterator[None]:
    """Turn what ends a run from outside into a RunError: a disk that fails, memory that is short.

    What is close to the failure names more; this is for all that nobody else expects.
    """
    try:
        with disk_errors(config.run.dir, "use"):
            yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"the device has no memory left ({str(error).splitlines()[0]}): lower "
            "data.micro_batch, or raise memory.device; then run the same command to go on"
        ) from error
    except torch.AcceleratorError as error:
        raise _device_failure(error) from error
    except Exception as error:
        if isinstance(error, RuntimeError) and any(n in str(error) for n in _DEVICE_FAILURES):
            raise _device_failure(error) from error
        if not out_of_memory(error):
            raise
        said = "" if isinstance(error, SwaptrainError) else f" ({_first_line(error)})"
        raise RunError(
            f"the machine gives this process no more memory{said}; memory.host is "
            f"{format_size(config.memory.host)}, which comes on top of what the process takes "
            "before it trains. Lower memory.host (or data.micro_batch), raise the limit of the "
            "process (ulimit -v, the container's), or end other programs; then run the same "
            "command again"
        ) from error


def _device_failure(error: Exception) -> RunError:
    return RunError(
        f"the device failed ({_first_line(error)}): what was committed is good; run the same "
        "command to go on, and if it fails again, look at the driver's messages (dmesg)"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation in RAM that failed is the error, or what led to it."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # an error may be its own cause
        seen.add(id(cause))
        if isinstance(cause, MemoryError):
            return True
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
            return True
        # torch has no class of its own for it on the CPU.
        if isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
