"""Hooks of parameters: taken from the module, tried out, and run where plain PyTorch runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swaptrain.capture.guards.lines import line_of_code
from swaptrain.errors import CaptureError

__all__ = ["Hook", "ParameterHooks", "put_hooks", "refuse_module_hooks", "take_hooks"]

Hook = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class ParameterHooks:
    """What is called with one parameter's gradient, in the order of registration."""

    gradient: tuple[Hook, ...] = ()
    """Of `register_hook`: takes the gradient of a micro-batch, may return another one."""
    accumulated: tuple[Hook, ...] = ()
    """Of `register_post_accumulate_grad_hook`: takes the parameter, whose `grad` is the sum."""

    def run_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the hooks make of the gradient of one micro-batch."""
        for hook in self.gradient:
            result = hook(gradient)
            gradient = gradient if result is None else result
        return gradient

    def run_accumulated(self, parameter: torch.Tensor, total: torch.Tensor) -> None:
        """Run the hooks after an addition to `total`, which changes in place.

        `parameter` has the weights of this moment.
        """
        shell = nn.Parameter(parameter.detach())
        shell.grad = total
        for hook in self.accumulated:
            hook(shell)
        if shell.grad is not total:
            assert shell.grad is not None
            total.copy_(shell.grad)


def take_hooks(module: nn.Module) -> Mapping[str, ParameterHooks]:
    """Return the hooks of the parameters of `module`, by name, and take them off.

    A capture runs backwards of its own, on tensors without values, which must not call them.
    """
    found: dict[str, ParameterHooks] = {}
    for name, parameter in module.named_parameters():
        hooks = ParameterHooks(
            tuple((parameter._backward_hooks or {}).values()),
            tuple((parameter._post_accumulate_grad_hooks or {}).values()),
        )
        if hooks.gradient or hooks.accumulated:
            found[name] = hooks
            parameter._backward_hooks = None
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    return found


def put_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target`, which takes the place of `source` in a module, its hooks."""
    for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, attribute)
        if hooks:
            setattr(target, attribute, hooks)


def refuse_module_hooks(module: nn.Module) -> None:
    """Raise CaptureError for a backward hook of a module, or of all modules."""
    glob = torch.nn.modules.module
    everywhere = {**glob._global_backward_hooks, **glob._global_backward_pre_hooks}
    for hook in everywhere.values():
        raise _refusal("all modules have", hook)
    for name, part in module.named_modules():
        own: dict[int, Any] = {**part._backward_hooks, **part._backward_pre_hooks}
        for hook in own.values():
            raise _refusal(f"module {name or 'itself'} ({type(part).__name__}) has", hook)


def _refusal(owner: str, hook: Any) -> CaptureError:
    return CaptureError(
        f"{owner} a backward hook, {described(hook)}: a captured graph has no place for it, and it "
        "would be dropped. Change gradients with tensor operations in the forward, or with a hook "
        "of a parameter (Parameter.register_hook), which is carried out"
    )


def described(hook: Any) -> str:
    """Name a hook by its function and the line where it is defined."""
    function = getattr(hook, "func", hook)
    function = getattr(function, "__func__", function)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name} ({line_of_code(getattr(function, '__code__', None))})"
