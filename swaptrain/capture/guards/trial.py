"""Tries a parameter's hook before the run begins: it must be a function of the gradient alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swaptrain.capture.guards.draws import drawn_from, generator_states
from swaptrain.capture.guards.hooks import Hook, ParameterHooks, described
from swaptrain.capture.guards.python_state import changes, hook_roots, reachable
from swaptrain.errors import CaptureError

__all__ = ["held_tensors", "tried_hooks"]

_ADVICE = (
    "swaptrain runs a hook on the gradient of each micro-batch, and it has to depend on that "
    "alone and on tensors that never change"
)


def tried_hooks(
    hooks: Mapping[str, ParameterHooks],
    parameters: Mapping[str, torch.Tensor],
    changing: Mapping[int, str],
) -> dict[str, ParameterHooks]:
    """Run each hook twice on the same random gradient; return them ready to be carried out.

    `parameters` are the module's, fake, as the graph computes with them. `changing` names by their
    storage the buffers that a forward changes. Raises CaptureError for a hook that keeps state,
    draws, or reads what has no value here or another value while the model trains.
    """
    return {
        name: replace(
            found,
            gradient=tuple(
                _tried_gradient(name, hook, parameters[name], changing) for hook in found.gradient
            ),
            accumulated=tuple(
                _tried_accumulated(name, hook, parameters[name], changing)
                for hook in found.accumulated
            ),
        )
        for name, found in hooks.items()
    }


def held_tensors(hooks: Mapping[str, ParameterHooks]) -> list[torch.Tensor]:
    """Return the tensors that the hooks hold, in an order that does not change."""
    return [
        tensor
        for found in hooks.values()
        for hook in (*found.gradient, *found.accumulated)
        for tensor in reachable({"hook": hook}, own_tensors=True).tensors.values()
        if not isinstance(tensor, FakeTensor)
    ]


def _tried_gradient(
    name: str, hook: Hook, parameter: torch.Tensor, changing: Mapping[int, str]
) -> Hook:
    example = _random_like(parameter)

    def run() -> tuple[torch.Tensor, bool]:
        given = example.clone(memory_format=torch.preserve_format)
        result = hook(given)
        _check_result(name, hook, result, example)
        wrote = given._version > 0
        return (given if result is None else result), wrote

    _, wrote = _run_twice(name, hook, changing, run)
    return _on_a_copy(hook) if wrote else hook


def _tried_accumulated(
    name: str, hook: Hook, parameter: torch.Tensor, changing: Mapping[int, str]
) -> Hook:
    if parameter.dtype != torch.float32:
        raise _refused(
            name,
            hook,
            f"runs after the addition to a gradient in float32, and the gradients are "
            f"{str(parameter.dtype).removeprefix('torch.')}: use model.dtype: float32, or "
            "Parameter.register_hook",
        )
    weights, example = _random_like(parameter), _random_like(parameter)

    def run() -> tuple[torch.Tensor, bool]:
        shell = nn.Parameter(weights.detach())
        version = shell._version
        shell.grad = example.clone(memory_format=torch.preserve_format)
        if hook(shell) is not None:
            raise _refused(name, hook, "returns something, which torch refuses: return None")
        same = shell._version == version and shell.data_ptr() == weights.data_ptr()
        if not same or not torch.equal(weights, _random_like(parameter)):
            raise _refused(name, hook, "writes to the parameter, which only the optimizer may")
        if shell.grad is None:
            raise _refused(name, hook, "takes the gradient away, so that nothing can be updated")
        _check_result(name, hook, shell.grad, example)
        return shell.grad, False

    _run_twice(name, hook, changing, run)
    return hook


def _run_twice(
    name: str,
    hook: Hook,
    changing: Mapping[int, str],
    run: Callable[[], tuple[torch.Tensor, bool]],
) -> tuple[torch.Tensor, bool]:
    roots = hook_roots(hook)
    before, generators = reachable(roots, own_tensors=True), generator_states()
    with _Touched(changing) as touched:
        try:
            first, wrote = run()
            second, _ = run()
        except CaptureError:
            raise
        except _ReadsError as error:
            raise _refused(name, hook, str(error)) from error
        except Exception as error:  # the hook is the user's: it may raise anything
            text = " ".join(str(error).split())
            raise _refused(name, hook, f"raised {type(error).__name__}: {text}") from error
    drawn = drawn_from(generators)
    if drawn is not None:
        raise _refused(name, hook, f"draws from {drawn}")
    behind = reachable(roots, own_tensors=True)
    changed = [*changes(before, behind)]
    changed += [n for n, t in behind.tensors.items() if before.tensors.get(n, t) is not t]
    if changed:
        raise _refused(name, hook, f"keeps state ({', '.join(sorted(set(changed))[:3])})")
    if touched.written():
        raise _refused(name, hook, "writes to a tensor that it keeps")
    if not torch.equal(_bits(first), _bits(second)):
        raise _refused(name, hook, "gives another result for the same gradient")
    return first, wrote


def _on_a_copy(hook: Hook) -> Hook:
    """Return a hook that writes to a copy: autograd may hand the memory on elsewhere, too."""

    def run(gradient: torch.Tensor) -> torch.Tensor:
        given = gradient.clone(memory_format=torch.preserve_format)
        result: torch.Tensor | None = hook(given)
        return given if result is None else result

    return run


def _check_result(name: str, hook: Hook, result: Any, example: torch.Tensor) -> None:
    if result is None:
        return
    if not isinstance(result, torch.Tensor):
        raise _refused(name, hook, f"returns {type(result).__name__}, not a gradient")
    if (result.shape, result.dtype, result.layout) != (
        example.shape,
        example.dtype,
        example.layout,
    ):
        raise _refused(
            name,
            hook,
            f"makes a gradient of {tuple(result.shape)} {result.dtype} of one of "
            f"{tuple(example.shape)} {example.dtype}",
        )


def _random_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a real tensor with the layout of a fake one, from a generator of its own."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    return drawn.normal_(generator=generator)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _refused(name: str, hook: Hook, why: str) -> CaptureError:
    return CaptureError(f"the hook {described(hook)} of parameter {name} {why}: {_ADVICE}")


class _ReadsError(Exception):
    """A hook reads a tensor that has no value of its own."""


class _Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that a hook reads and has not made."""

    def __init__(self, changing: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changing = changing
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for tensor in tree_leaves((args, kwargs or {})):
            if not isinstance(tensor, torch.Tensor):
                continue
            if isinstance(tensor, FakeTensor):
                raise _ReadsError("reads a parameter, or what is made of one")
            named = self._changing.get(int(tensor.untyped_storage()._cdata))
            if named is not None:
                raise _ReadsError(f"reads the buffer {named}, which the forward changes")
            if id(tensor) not in self._made:
                self._seen.setdefault(id(tensor), (tensor, tensor._version))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._seen:
                self._made[id(tensor)] = tensor
        return result

    def written(self) -> bool:
        """Whether a tensor that was there before has changed, but for what hooks are given."""
        return any(tensor._version != version for tensor, version in self._seen.values())
