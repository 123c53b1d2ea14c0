"""Puts other contents into a tensor object, so that everything that refers to it sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.capture.init.replay import Window

__all__ = ["FakeTwins", "become", "swapping_fakes", "user_attributes"]


def become(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Make the object `tensor` hold what `content` holds: class, data, flags; real or fake.

    References to `tensor` stay valid (tied parameters, `nn.LSTM._flat_weights`), and so do the
    attributes that the user set on it. `content` must not be used afterwards.
    """
    own = user_attributes(tensor)
    state = dict(vars(content))
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        tensor.__class__, content.__class__ = content.__class__, tensor.__class__
        torch._C._swap_tensor_impl(tensor, content)
    vars(tensor).clear()
    vars(tensor).update(state | own)


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that were set on `tensor`, without those that make it fake."""
    if not isinstance(tensor, FakeTensor):
        return dict(vars(tensor))
    with _disable_current_modes(), tensor.fake_mode:
        fresh = nn.Parameter(torch.empty(0))
    return {name: value for name, value in vars(tensor).items() if name not in vars(fresh)}


class FakeTwins:
    """Makes fake tensors shaped like real ones; those that shared a storage share one again."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, window: Window, storage_bytes: int) -> torch.Tensor:
        """Return a fake tensor on the twin of `window.storage`, which has `storage_bytes`."""
        with _disable_current_modes(), self._fake_mode, torch.no_grad():
            if window.storage not in self._storages:
                base = torch.empty(storage_bytes, dtype=torch.uint8)
                self._storages[window.storage] = base.untyped_storage()
            return window.on(self._storages[window.storage])


@contextlib.contextmanager
def swapping_fakes() -> Iterator[None]:
    """Let `torch.utils.swap_tensors` work on fake tensors while the body runs.

    `nn.Module._apply` (`.half()`, `.to(...)`) insists on it for fake parameters, and it refuses
    tensors with weak references, which fake ones always have.
    """
    original = torch.utils.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, FakeTensor) or isinstance(second, FakeTensor):
            become(first, second)
        else:
            original(first, second)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap_tensors
    try:
        yield
    finally:
        torch.utils.swap_tensors = original
