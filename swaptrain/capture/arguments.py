"""Whether a module's forward takes a micro-batch, by name."""

from __future__ import annotations

import inspect
from collections.abc import Collection

from torch import nn

from swaptrain.capture.forward.constants import constants_of
from swaptrain.errors import CaptureError

__all__ = ["check_arguments"]


def check_arguments(module: nn.Module, keys: Collection[str]) -> None:
    """Raise CaptureError where the forward has no argument of a key, or needs one that is no key.

    What takes any keyword, and what a hook or a decorator may change, is left to the forward.
    """
    twice = [key for key in keys if key in constants_of(module)]
    if twice:
        raise CaptureError(
            f"model.constants: {', '.join(twice)} is a key of the data's items too: leave one out"
        )
    parameters = _parameters(module)
    if parameters is None:
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in named]
    unknown = [key for key in keys if key not in names]
    missing = [p.name for p in named if p.default is p.empty and p.name not in keys]
    if not unknown and not missing:
        return
    wrong = [f"has no argument {', '.join(unknown)}"] if unknown else []
    wrong += [f"is not given {', '.join(missing)}"] if missing else []
    raise CaptureError(
        f"the items' keys are {', '.join(keys)}; the forward of {type(module).__name__} takes "
        f"{', '.join(names) or 'nothing'}: it {' and '.join(wrong)}. The keys of a data set's "
        "items are the names of the forward's arguments: rename one or the other"
    )


def _parameters(module: nn.Module) -> list[inspect.Parameter] | None:
    """Return what the forward takes; None where that cannot be said, or is any keyword."""
    if module._forward_pre_hooks:
        return None
    try:
        # Of a decorated forward what the decorator takes: it may rename arguments.
        found = list(inspect.signature(module.forward, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in found) else found
