"""Sees the calls of a forward that torch.export forgets, and refuses them with their line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode

from swaptrain.capture.guards.lines import called_by_model, model_line
from swaptrain.capture.guards.replaced import holders_of, replaced
from swaptrain.errors import CaptureError

__all__ = ["watched_forward"]

_HOOKS: dict[Any, str] = {
    torch.Tensor.register_hook: "Tensor.register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "Tensor.register_post_accumulate_grad_hook",
}
_GRADIENTS: dict[Any, str] = {
    torch.Tensor.backward: "Tensor.backward()",
    torch.autograd.backward: "torch.autograd.backward",
    torch.autograd.grad: "torch.autograd.grad",
}
_WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
_SHOWS_DATA: Any = torch.Tensor.data
_GRAD_FN: Any = torch.Tensor.grad_fn
_GRAD: Any = torch.Tensor.grad


@contextlib.contextmanager
def watched_forward() -> Iterator[None]:
    """Raise CaptureError from inside of a forward where it does what a graph would lose.

    A gradient taken in the forward, a hook on an activation, a seed, a write through `.data`, a
    draw from a generator of its own. `.data` that is only read becomes `detach()`, and
    `inference_mode` becomes `no_grad`: the same numbers, and the graph has both.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, what, advice in _REFUSED:
            stack.enter_context(replaced([(owner, name)], _refusal(what, advice)))
        # At this moment: torch._dynamo wraps them when it is imported.
        seeds = [getattr(owner, name) for owner in (torch, torch.random) for name in _SEEDS]
        for seed, places in zip(seeds, holders_of(seeds), strict=True):
            stack.enter_context(replaced(places, _seed_refusal(seed)))
        stack.enter_context(_inference_without_gradients())
        stack.enter_context(_checked_saving())
        stack.enter_context(_Watch())
        yield


class _Watch(TorchFunctionMode):
    """Looks at every call of a torch function, before torch.export does."""

    def __init__(self) -> None:
        super().__init__()
        self._data: dict[int, torch.Tensor] = {}
        """Tensors that came of `.data`, and their views, by identity; kept alive."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HOOKS:
            raise _hook_refusal(_HOOKS[func])
        if func in _GRADIENTS:
            raise CaptureError(_in_the_forward(_GRADIENTS[func], _NO_GRADIENT))
        if func == _GRAD_FN.__get__ and called_by_model(1):
            raise CaptureError(
                _in_the_forward("Tensor.grad_fn", "a captured graph has other nodes of autograd")
            )
        if func in (_GRAD.__get__, _GRAD.__set__) and called_by_model(1):
            raise CaptureError(_in_the_forward("Tensor.grad", _NO_GRAD))
        if func == _SHOWS_DATA.__set__:
            raise CaptureError(_in_the_forward("`tensor.data = ...`", _NO_DATA))
        if func == _SHOWS_DATA.__get__:
            shown: torch.Tensor = args[0].detach()
            self._data[id(shown)] = shown
            return shown
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and name.endswith("_"):
            raise CaptureError(
                _in_the_forward(f"torch.{name}", "write to each tensor by itself instead")
            )
        drawn = kwargs.get("generator")
        if drawn is not None or any(isinstance(argument, torch.Generator) for argument in args):
            raise CaptureError(
                _in_the_forward(
                    f"torch's {name} with a generator of its own",
                    "a captured graph would not go on with that generator's state: draw without "
                    "`generator=`, and swaptrain keys the draw by seed, step and micro-batch",
                )
            )
        if self._data and args and id(args[0]) in self._data:
            return self._on_data(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _on_data(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of what `.data` gave; refuse a write, remember a view."""
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if writes and name != "requires_grad_":
            raise CaptureError(_in_the_forward(f"`tensor.data.{name}`", _NO_DATA))
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and (
            result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        ):
            self._data[id(result)] = result
        return result


_NO_GRADIENT = (
    "a gradient taken inside of the forward is no part of a captured graph; write the gradient out "
    "as tensor operations, or train this model in plain PyTorch"
)
_NO_GRAD = (
    "in plain PyTorch it holds what earlier micro-batches of the step have added up, which a "
    "captured graph does not see; change gradients with a hook of the parameter "
    "(Parameter.register_hook)"
)
_NO_DATA = (
    "autograd does not see writes through `.data`, and neither does a captured graph; write to a "
    "registered buffer, or compute a new tensor"
)
_SAME_DRAWS = (
    "swaptrain keys each draw by seed, step, micro-batch and operation; take the call out of the "
    "forward, and keep a fixed random tensor in a registered buffer"
)
_REFUSED: tuple[tuple[Any, str, str, str], ...] = (
    (torch.autograd, "_engine_run_backward", "torch.autograd.grad or backward", _NO_GRADIENT),
    (eager_transforms, "grad_impl", "torch.func.grad", _NO_GRADIENT),
    (eager_transforms, "grad_and_value_impl", "torch.func.grad_and_value", _NO_GRADIENT),
    (eager_transforms, "_vjp_with_argnums", "torch.func.vjp or jacrev", _NO_GRADIENT),
    (eager_transforms, "_jvp_with_argnums", "torch.func.jvp or jacfwd", _NO_GRADIENT),
    (torch.autograd.forward_ad, "enter_dual_level", "forward-mode autograd", _NO_GRADIENT),
)
_SEEDS = ("manual_seed", "seed", "set_rng_state")


def _in_the_forward(what: str, advice: str) -> str:
    return f"the forward uses {what} at {model_line()}: {advice}"


def _hook_refusal(what: str) -> CaptureError:
    return CaptureError(
        _in_the_forward(
            what,
            "a hook of autograd on an activation hangs outside of the captured graph and would be "
            "dropped; scale or change a gradient with tensor operations, as in "
            "x * 0.1 + (x * 0.9).detach()",
        )
    )


def _refusal(what: str, advice: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(_in_the_forward(what, advice))

    return refuse


def _seed_refusal(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a seed that the model sets; torch's own functions restore states."""
    name = original.__name__

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if called_by_model(1):
            raise CaptureError(_in_the_forward(f"torch.{name}", _SAME_DRAWS))
        return original(*args, **kwargs)

    return refuse


@contextlib.contextmanager
def _inference_without_gradients() -> Iterator[None]:
    """Let `torch.inference_mode` be `no_grad`: an export inlines it, gradients and all."""

    def enter(mode: Any) -> None:
        mode._swaptrain_no_grad = torch.no_grad() if mode.mode else contextlib.nullcontext()
        mode._swaptrain_no_grad.__enter__()

    def leave(mode: Any, *error: Any) -> None:
        mode._swaptrain_no_grad.__exit__(*error)

    owner = torch.inference_mode
    with replaced([(owner, "__enter__")], enter), replaced([(owner, "__exit__")], leave):
        yield


@contextlib.contextmanager
def _checked_saving() -> Iterator[None]:
    """Refuse hooks on saved tensors, but for torch's own `save_on_cpu`, which changes no number."""
    owner = torch.autograd.graph.saved_tensors_hooks
    original = owner.__enter__

    def enter(hooks: Any) -> None:
        if type(hooks).__module__.partition(".")[0] != "torch" or type(hooks) is owner:
            raise CaptureError(
                _in_the_forward(
                    "torch.autograd.graph.saved_tensors_hooks",
                    "swaptrain saves and recomputes activations itself, and what these hooks do "
                    "to the saved tensors would be dropped; leave them out",
                )
            )
        original(hooks)

    with replaced([(owner, "__enter__")], enter):
        yield
