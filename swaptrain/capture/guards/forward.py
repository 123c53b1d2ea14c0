"""Compares what a model remembers before and after a forward that is being exported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.guards.draws import (
    Noted,
    generator_states,
    refuse_draws,
    watched_draws,
)
from swaptrain.capture.guards.hooks import refuse_module_hooks
from swaptrain.capture.guards.python_state import changes, model_roots, reachable
from swaptrain.capture.guards.settings import changed_setting, settings
from swaptrain.capture.guards.watch import watched_forward
from swaptrain.errors import CaptureError

__all__ = ["Forward", "ForwardGuard", "owner_of"]

_STANDARD = frozenset(vars(nn.Module()))
"""Names that every module has."""


@dataclass
class Forward:
    """What one forward left behind."""

    changed: dict[str, str] = field(default_factory=dict)
    """Plain Python state that is another one, by path: what it was and is."""
    assigned: dict[str, torch.Tensor] = field(default_factory=dict)
    """By dotted name: the tensors that were assigned to buffers, in the order of the modules."""
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same of plain attributes that held another tensor."""
    added: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same of attributes that held none."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of this forward that containers and objects hold after it, by path."""
    clock: str | None = None
    """The line that asked for the time, if one did."""
    left: list[tuple[nn.Module, dict[str, object]]] = field(default_factory=list)
    """The plain attributes of every module as the forward left them."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that outlive the forward, in the order in which the graph returns them."""
        return {**self.assigned, **self.replaced, **self.added, **self.kept}

    @property
    def again(self) -> bool:
        """Whether another forward has to show that the next ones compute the same."""
        return bool(self.changed or self.added or self.kept or self.clock)

    def restore(self) -> None:
        """Give the modules the attributes that the forward left: torch.export takes them back."""
        for module, attributes in self.left:
            for name in vars(module).keys() - attributes.keys() - _STANDARD:
                delattr(module, name)
            vars(module).update(attributes)

    def forget_added(self, model: nn.Module) -> None:
        """Take the tensors away that the forward gave to attributes which held none."""
        for name in self.added:
            owner, key = owner_of(model, name)
            if key in owner._buffers:
                owner._buffers[key] = None
            elif key in vars(owner):
                vars(owner)[key] = None


class ForwardGuard:
    """Stands around the forwards of one model; `last` says what the last one left."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.last = Forward()
        refuse_module_hooks(model)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Look before and after the forward that runs inside.

        Buffers get the tensors back that they had; `last.assigned` has the new ones. Raises
        CaptureError where the forward does what no graph can repeat.
        """
        model = self._model
        roots = model_roots(model)
        picture, tensors = reachable(roots), _own_tensors(model)
        flags = _flags(model)
        states, before = generator_states(), settings()
        noted = Noted()
        with watched_forward(), watched_draws(noted):
            yield
        self.last = last = Forward(clock=noted.clock)
        refuse_draws(states, noted, model)
        setting = changed_setting(before)
        if setting is not None:
            raise CaptureError(
                f"the forward changes {setting}: the captured graph would not; set it before "
                "training, or put it back in the forward"
            )
        if _flags(model) != flags:
            raise CaptureError(
                "the forward changes requires_grad of a parameter: set it in the constructor"
            )
        refuse_module_hooks(model)
        behind = reachable(roots)
        last.changed = changes(picture, behind)
        old = {id(tensor) for tensor in picture.tensors.values()}
        last.kept = {
            path: tensor
            for path, tensor in behind.tensors.items()
            if id(tensor) not in old and isinstance(tensor, FakeTensor)
        }
        self._compare_tensors(tensors, last)
        last.left = [(m, _plain_attributes(m)) for m in model.modules()]

    def _compare_tensors(self, before: dict[str, _OwnTensor], last: Forward) -> None:
        after = _own_tensors(self._model)
        for name, place in after.items():
            old = before.get(name)
            if old is not None and old.tensor is place.tensor:
                continue
            if old is not None and old.buffer != place.buffer:
                raise CaptureError(f"the forward turns {name} into a buffer, or out of one")
            if old is None:
                last.added[name] = place.tensor
            elif not place.buffer:
                last.replaced[name] = place.tensor
            else:
                last.assigned[name] = place.tensor
        for name in before:
            if name not in after:
                raise CaptureError(
                    f"the forward takes the tensor {name} away: keep it, or make it in the forward "
                    "and pass it on as an argument"
                )
        for name in last.assigned:
            owner, key = owner_of(self._model, name)
            owner._buffers[key] = before[name].tensor


@dataclass(frozen=True)
class _OwnTensor:
    tensor: torch.Tensor
    buffer: bool


def _own_tensors(model: nn.Module) -> dict[str, _OwnTensor]:
    """Return the buffers, and the tensors in plain attributes, of every module by dotted name."""
    found: dict[str, _OwnTensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found[prefix + name] = _OwnTensor(buffer, True)
        for name, value in vars(module).items():
            if name not in _STANDARD and isinstance(value, torch.Tensor):
                found[prefix + name] = _OwnTensor(value, False)
    return found


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _STANDARD}


def _flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the tensor with a dotted name, and its name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
