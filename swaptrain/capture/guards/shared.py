"""Refuses parameters whose memory somebody else sees: an update would change both."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.errors import CaptureError

__all__ = ["check_changing", "check_memory"]

_MOST_ELEMENTS = 1 << 28
"""Of a storage that is looked at element by element; two views of a larger one are refused."""


@dataclass(frozen=True)
class _Extent:
    """A parameter or buffer, from its first byte in its storage to behind its last."""

    name: str
    tensor: torch.Tensor
    trained: bool
    """It is stepped by an optimizer, or changed by the forward."""

    @property
    def begin(self) -> int:
        return int(self.tensor.storage_offset()) * self.tensor.element_size()

    @property
    def end(self) -> int:
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        extent = sum((n - 1) * abs(s) for n, s in steps)
        return self.begin + (extent + 1) * self.tensor.element_size()


def check_memory(module: nn.Module) -> None:
    """Raise CaptureError where a trained parameter lies in memory of another tensor of `module`.

    Two parameters on one memory (`b.weight.data = a.weight.data`) have a gradient and an optimizer
    state each in plain PyTorch, and both updates write the same numbers, one over the other. A
    buffer on it follows the updates. Parameters that are one object are tied and pass, as do
    pieces of one storage that do not overlap, and what nothing trains.
    """
    storages: dict[int, list[_Extent]] = {}
    for storage, place in _places(module):
        for other in storages.setdefault(storage, []):
            if (place.trained or other.trained) and _overlap(place, other):
                raise _refusal(other, place)
        storages[storage].append(place)


def check_changing(tensors: Mapping[str, torch.Tensor], changing: Collection[str]) -> None:
    """Raise CaptureError where a buffer that the forward changes is seen through another tensor.

    `tensors` are those of the model that are no parameters, by name, `changing` the names of the
    buffers that the forward changes: each of them is stored by itself, and the other one would not
    follow. One tensor under several names passes.
    """
    storages: dict[int, list[_Extent]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        place = _Extent(name, tensor, name in changing)
        for other in storages.setdefault(int(tensor.untyped_storage()._cdata), []):
            changed, seen = (place, other) if place.trained else (other, place)
            if changed.trained and other.tensor is not tensor and _overlap(place, other):
                raise CaptureError(
                    f"{seen.name} lies in the memory of the buffer {changed.name}, which the "
                    f"forward changes: read {changed.name} itself in the forward, or register a "
                    "copy of it (.clone()) that keeps its value"
                )
        storages[int(tensor.untyped_storage()._cdata)].append(place)


def _places(module: nn.Module) -> Iterator[tuple[int, _Extent]]:
    parameters = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
    buffers = [(f"the buffer {name}", b, False) for name, b in module.named_buffers()]
    for name, tensor, trained in (*parameters, *buffers):
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        yield int(tensor.untyped_storage()._cdata), _Extent(name, tensor, trained)


def _overlap(one: _Extent, other: _Extent) -> bool:
    """Whether two places share an element; columns that take turns do not."""
    if one.end <= other.begin or other.end <= one.begin:
        return False
    size, span = one.tensor.element_size(), max(one.end, other.end)
    if size != other.tensor.element_size() or span // size > _MOST_ELEMENTS:
        return True
    with _disable_current_modes():
        taken = torch.zeros(span // size, dtype=torch.bool)
        for place in (one, other):
            t = place.tensor
            part = taken.as_strided(tuple(t.shape), t.stride(), int(t.storage_offset()))
            if part.any():
                return True
            part.fill_(True)
    return False


def _refusal(one: _Extent, other: _Extent) -> CaptureError:
    if other.name.startswith("the buffer"):
        return CaptureError(
            f"{other.name} lies in the memory of the parameter {one.name} and would follow its "
            "updates: use the parameter itself, or register a copy of it (.clone())"
        )
    owner, _, attribute = other.name.rpartition(".")
    target = f"model.{owner}.{attribute}" if owner else f"model.{attribute}"
    return CaptureError(
        f"the parameters {one.name} and {other.name} lie in the same memory (`.data =`, or a "
        "Parameter made of the other's tensor): in plain PyTorch each has a gradient and an "
        "optimizer state of its own, and their updates write over each other. If they are to be "
        f"one weight, tie them: {target} = model.{one.name}; else give one a copy (.clone()). A "
        "transposed weight is tied by using F.linear(x, weight.t())"
    )
