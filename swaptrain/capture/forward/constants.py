"""Arguments of a forward that are no tensors: the same Python values in every call."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from swaptrain.errors import CaptureError

__all__ = ["bind_constants", "constants_of"]


class _Bound:
    """A forward that is given some of its arguments."""

    def __init__(self, forward: Callable[..., Any], constants: Mapping[str, Any]) -> None:
        self.constants = dict(constants)
        self._forward = forward
        signature = inspect.signature(forward)
        rest = [p for p in signature.parameters.values() if p.name not in constants]
        self.__signature__ = signature.replace(parameters=rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs, **self.constants)


def bind_constants(module: nn.Module, constants: Mapping[str, Any]) -> nn.Module:
    """Let every forward of `module` be given `constants` too; return the module.

    Raises CaptureError for a name that its forward does not take.
    """
    if constants:
        for name in constants:
            _check(module, name)
        module.forward = _Bound(module.forward, constants)
    return module


def constants_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the constants that a module's forward is given."""
    bound = vars(module).get("forward")
    return bound.constants if isinstance(bound, _Bound) else {}


def _check(module: nn.Module, name: str) -> None:
    """Raise CaptureError unless the forward has an argument of that name.

    A forward that takes any keyword may say which (`**kwargs: Unpack[SomeTypedDict]`). Where it
    does not, a name that is nearly that of an argument is refused: it would be passed over.
    """
    parameters = inspect.signature(module.forward).parameters
    named = {
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if name in named:
        return
    anything = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    further = None if anything is None else _keywords(anything.annotation)
    known = sorted(named | (further or set()))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if name in known or (anything is not None and further is None and not close):
        return
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise CaptureError(
        f"model.constants: the forward of {type(module).__name__} has no argument {name!r}{hint}. "
        f"It takes {', '.join(parameters)}"
    )


def _keywords(annotation: Any) -> set[str] | None:
    """Return the names that `Unpack[SomeTypedDict]` lists; None for any other annotation."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Unpack and typing.is_typeddict(arguments[0]):
        return set(arguments[0].__annotations__)
    return None
