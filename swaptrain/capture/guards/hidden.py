"""Names tensors of a captured graph that are no parameters and no buffers of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from swaptrain.capture.guards.lines import is_models_file
from swaptrain.capture.guards.python_state import model_roots, reachable
from swaptrain.errors import CaptureError

__all__ = ["fake_constant", "own_lines", "refuse_hidden_state"]


def refuse_hidden_state(module: nn.Module, changing: Mapping[int, str]) -> None:
    """Raise CaptureError where a forward writes to a tensor that is no attribute of a module.

    `changing` names, by their storage, the tensors that are written. Those of the model's modules
    are state of the run; a tensor in a container, an object or a Python module has no name there.
    """
    own = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    for path, part in module.named_modules():
        own |= {
            f"{path}.{name}" if path else name
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor)
        }
    hidden = {storage: name for storage, name in changing.items() if name not in own}
    if not hidden:
        return
    for path, tensor in reachable(model_roots(module)).tensors.items():
        if int(tensor.untyped_storage()._cdata) in hidden:
            raise CaptureError(_written(path))
    raise CaptureError(_written("that lies outside of its modules"))


def fake_constant(node: fx.Node) -> CaptureError:
    """Return what to raise for a tensor without values that the graph takes for a constant."""
    name = str(node.target).removeprefix("model.")
    if "lifted_tensor" not in name:
        return CaptureError(
            f"{name} is a plain tensor attribute made from a parameter in the constructor: compute "
            "it in the forward from the parameter, or register a copy of it (.clone()) as a buffer"
        )
    lines = [line for user in node.users for line in own_lines(user)]
    where = f" ({lines[-1]})" if lines else ""
    return CaptureError(
        f"the forward computes a tensor in a way that the captured graph cannot follow{where}: "
        "torch.vmap over parameters or activations, a tensor kept from an earlier forward, or a "
        "tensor made in another thread; write it with plain tensor operations"
    )


def own_lines(node: fx.Node) -> list[str]:
    """Return the lines of the model's own code in a node's stack, outermost first."""
    stack = (node.meta.get("stack_trace") or "").splitlines()
    found = []
    for line in stack:
        parts = line.strip().split('"')
        if len(parts) == 3 and is_models_file(parts[1]):
            found.append(f"{parts[1]}{parts[2].replace(', line ', ':')}")
    return found


def _written(what: str) -> str:
    return (
        f"the forward writes to a tensor {what}, which is no buffer: register it as a buffer of a "
        "module, so that it is kept with the run's state"
    )
