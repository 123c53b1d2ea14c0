"""A device that is none: tensors that say they are elsewhere, and refuse what a GPU refuses.

What they hold lies in ordinary memory, and what is done to them is done there by the CPU's kernels.
So a run on this device has the CPU's bits, if it brings every tensor to where it is computed with;
an operation on tensors of two devices fails, as it does with a GPU. Its copies are late besides.

torch knows one such device in a process, for good: `python -m tests.support.other_device` reads a
JSON object of configs from its standard input, trains each on the CPU and here, and says what came
of it: whether the bits are the same, and which operations let the host wait for a number while an
instruction was begun. The code of the one that is called "unplaced" is left as it was traced, for
the CPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from swaptrain.compute import runner
from swaptrain.compute.copy_streams import StreamDevice
from swaptrain.errors import SwaptrainError
from swaptrain.planning import prepare
from swaptrain.run.steps import executor
from swaptrain.spans import span
from tests.support.runs import assert_same_bits, config_of, losses, trained, weights
from tests.support.streams import LateStreams

__all__ = ["DEVICE", "OtherStreams"]

_setup_privateuseone_for_python_backend("other")
DEVICE = torch.device("other", 0)
_CPU = torch.device("cpu")
_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}
_waits: set[str] | None = None
"""Operations that let the host wait, while an instruction is begun."""


class OtherTensor(Tensor):
    """A tensor of `DEVICE`; `held` is where its numbers are."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OtherTensor:
        made: OtherTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation with what the tensors hold; refuse tensors of two devices."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OtherTensor)]
    elsewhere = [t for t in tensors if t.dim() and not isinstance(t, OtherTensor)]
    copies = function in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    if here and elsewhere and not copies:
        raise RuntimeError(f"{function}: expected all tensors to be on the same device")
    to = torch.device(kwargs.get("device") or (DEVICE if here else _CPU))
    if _waits is not None and here and (function in _WAITING or to == _CPU):
        _waits.add(str(function))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _CPU}
    outer = {id(tensor.held): tensor for tensor in here}

    def wrapped(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in outer:
            return outer[id(result)]  # changed in place
        return OtherTensor(result) if to.type == DEVICE.type else result

    return tree_map(wrapped, function(*tree_map(_held, args), **tree_map(_held, kwargs)))


def _held(item: Any) -> Any:
    return item.held if isinstance(item, OtherTensor) else item


def _empty(
    size: list[int], *, dtype: torch.dtype | None = None, memory_format: Any = None, **_: Any
) -> Tensor:
    return OtherTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(
    size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return OtherTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    copied: Tensor = _held(target).copy_(_held(source))
    return copied


# What makes a tensor of nothing has no tensor whose class would see it.
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


class OtherStreams(LateStreams):
    """The queues of `DEVICE`: late, and between two kinds of tensors."""

    device = DEVICE

    def empty(self, view: Tensor) -> Tensor:
        return OtherTensor(super().empty(view))


@contextlib.contextmanager
def _noting_waits() -> Iterator[set[str]]:
    """Note what lets the host wait in the executor's spans, in which it begins an instruction."""
    found = set[str]()

    @contextlib.contextmanager
    def noted(*args: Any) -> Iterator[None]:
        global _waits
        _waits = found
        try:
            with span(*args):
                yield
        finally:
            _waits = None

    with mock.patch.object(executor, "span", noted):
        yield found


def _compared(folder: Path, tree: dict[str, Any]) -> tuple[str, list[str]]:
    """Train on the CPU and on `DEVICE`; return how that ended, and what let the host wait."""
    plain = trained(config_of(folder / "plain", tree))
    device = StreamDevice(OtherStreams(limit_bytes=1 << 30))
    with mock.patch.object(prepare, "open_device", lambda *_: device), _noting_waits() as waits:
        try:
            other = trained(config_of(folder / "other", tree))
            assert losses(plain) == losses(other), (losses(plain), losses(other))
            assert_same_bits(weights(plain, state=True), weights(other, state=True))
        except (SwaptrainError, RuntimeError, AssertionError) as error:
            return str(error), sorted(waits)
    return "same bits", sorted(waits)


def main() -> None:
    """Compare every config that the standard input holds."""
    # This device would choose other kernels for attention than the CPU does.
    torch.backends.cuda.enable_flash_sdp(False)
    answers = {}
    for name, tree in json.load(sys.stdin).items():
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if name == "unplaced":
                stack.enter_context(
                    mock.patch.object(runner, "place", lambda captured, _: captured)
                )
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            answers[name] = _compared(Path(folder), tree)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
