"""Gives a buffer that has several names its first one, as a tied parameter has."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from swaptrain.capture.trace import resolve_attribute
from swaptrain.errors import CaptureError

__all__ = ["name_tied_buffers", "refuse_parted_buffers"]


def name_tied_buffers(captured: fx.GraphModule, module: nn.Module) -> None:
    """Let the graph fetch each buffer of `module` by the name that `named_buffers` gives it.

    A module at two places of the model, such as a batch norm that is also in a list, has two names
    for each of its buffers; a run keeps, compares and exports one.
    """
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    for node in list(captured.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = resolve_attribute(captured, str(node.target))
        name = names.get(id(tensor))
        if name is not None and node.target != f"model.{name}":
            _place(captured, f"model.{name}", tensor)
            node.target = f"model.{name}"
    captured.recompile()


def refuse_parted_buffers(module: nn.Module, assigned: Iterable[str]) -> None:
    """Raise CaptureError where a forward assigns a buffer that another attribute holds too.

    In plain PyTorch the other one keeps the tensor from before: they part in the first forward.
    """
    places: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append(f"{path}.{key}" if path else key)
    for name in assigned:
        names = next((names for names in places.values() if name in names), [])
        others = [other for other in names if other != name]
        if others:
            raise CaptureError(
                f"the forward assigns a tensor to {name}, which was one buffer with {others[0]}: "
                "only the one of that name would follow. Give each a tensor of its own (.clone()), "
                f"or write in place (self.{name.rpartition('.')[2]}.copy_(...))"
            )


def _place(captured: fx.GraphModule, target: str, tensor: torch.Tensor) -> None:
    """Give `captured` a tensor at a dotted path, where it has none."""
    owner: nn.Module = captured
    *path, key = target.split(".")
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    if not hasattr(owner, key):
        owner.register_buffer(key, tensor, persistent=False)
