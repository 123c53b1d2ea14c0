"""From what a forward returns to the loss: one rule for the capture and for plain PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from swaptrain.errors import CaptureError

__all__ = ["NoLossError", "loss_of", "scalars_of"]

_CURE = (
    "Let forward(**batch) return a scalar tensor, or put it first in a tuple, under 'loss' in a "
    "dict, or into an attribute `loss`"
)
_LOSS_ARGUMENTS = ("label", "loss", "target", "positions")
"""Parts of the names of arguments that a forward computes its loss from."""
_NOT_SCALARS = ("loss", "perplexity", "loss_before", "perplexity_before")
"""Names that a row has for the loss itself."""
_MOST = 8
"""How many names a message lists."""


class NoLossError(CaptureError):
    """The forward gives nothing that is a loss."""


def loss_of(
    result: object, model: nn.Module | None = None, given: Collection[str] = ()
) -> torch.Tensor:
    """Return the loss of what a forward returned, a tensor without dimensions.

    A tensor is the loss itself; a dict, and an object with a `loss`, has it under that name. In a
    tuple or a list it comes first, or is the only tensor without dimensions. `model` and `given`,
    the names of the arguments that it was given, are for the messages.

    Raises:
        NoLossError: there is no loss, or more than one tensor that might be it.
    """
    found = _find(result, model, given)
    if not isinstance(found, torch.Tensor):
        raise NoLossError(_no_tensor(result, found))
    if not found.is_floating_point():
        raise NoLossError(
            f"the model's loss has the dtype {_dtype(found)}: a loss is a floating-point number. "
            f"{_CURE}"
        )
    if found.numel() != 1:
        raise NoLossError(
            f"the model's loss has shape {tuple(found.shape)}: reduce it to a scalar, for example "
            f"with .mean(){_weighted(found)}"
        )
    return found if found.ndim == 0 else found.reshape(())


def scalars_of(result: object) -> dict[str, torch.Tensor]:
    """Return what a forward gave beside its loss that is one number, by name.

    Those are the tensors without dimensions in a dict, a named tuple or the fields of an object.
    """
    if isinstance(result, Mapping):
        fields = dict(result)
    elif hasattr(result, "_asdict"):
        fields = result._asdict()
    else:
        fields = getattr(result, "__dict__", {})
    return {
        name: value
        for name, value in fields.items()
        if isinstance(name, str)
        and name not in _NOT_SCALARS
        and isinstance(value, torch.Tensor)
        and value.ndim == 0
        and not value.is_complex()
    }


def _find(result: object, model: nn.Module | None, given: Collection[str]) -> object:
    """Return what takes the place of the loss in a result, of whatever type it is."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        found = result["loss"]
    elif hasattr(result, "loss"):
        found = result.loss
    elif isinstance(result, tuple | list):
        return _in_sequence(result)
    else:
        raise NoLossError(f"the model returned {_shown(result)}, not a loss. {_CURE}")
    if found is None:
        raise NoLossError(f"the model returned no loss: it is None. {_missing(model, given)}")
    return found


def _in_sequence(result: tuple[Any, ...] | list[Any]) -> object:
    """Return the first element, or the only scalar where the first one is none."""
    first = result[0] if result else None
    if _is_scalar(first):
        return first
    scalars = [index for index, element in enumerate(result) if _is_scalar(element)]
    if len(scalars) == 1:
        return result[scalars[0]]
    if not scalars and isinstance(first, torch.Tensor) and first.numel() == 1:
        return first
    which = (
        f"elements {', '.join(map(str, scalars))} are scalars, and which is the loss is not said"
        if scalars
        else "no element is a scalar"
    )
    raise NoLossError(f"the model returned {_shown(result)}: {which}. {_CURE}")


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _missing(model: nn.Module | None, given: Collection[str]) -> str:
    """Say which arguments of the forward were not given that the loss may be computed from."""
    names = [] if model is None else list(inspect.signature(model.forward).parameters)
    lacking = [
        name
        for name in names
        if name not in given and any(part in name for part in _LOSS_ARGUMENTS)
    ]
    if not lacking:
        return f"See which arguments the forward computes it from. {_CURE}"
    assert model is not None
    return (
        f"It was given {', '.join(given) or 'nothing'}; the forward of {type(model).__name__} also "
        f"takes {', '.join(lacking)}: give what is a tensor as a key of the data's items, and what "
        "is none (return_loss) in model.constants"
    )


def _no_tensor(result: object, found: object) -> str:
    where = "its loss" if found is not result else "it"
    if isinstance(found, float | int):
        return (
            f"the model returned a loss of type {type(found).__name__}, which has no gradient: "
            "return the tensor, without .item() or float()"
        )
    return f"the model returned {_shown(result)}: {where} is {_shown(found)}, not a tensor. {_CURE}"


def _weighted(loss: torch.Tensor) -> str:
    return " over the items" if loss.ndim == 1 else ""


def _shown(value: object) -> str:
    """Say what a value is: its type, and the names or the kinds of its parts."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = [str(key) for key in value]
        return f"{name} with {_listed(keys) or 'nothing in it'}"
    if isinstance(value, tuple | list):
        return f"{name} of {_listed([_kind(v) for v in value]) or 'nothing'}"
    return name


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_dtype(value)}{list(value.shape)}"
    return type(value).__name__


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more
