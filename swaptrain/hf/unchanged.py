"""A model in memory is trained from its directory: what that would lose is refused."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from swaptrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_unchanged"]

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "_post_accumulate_grad_hooks",
)
_OF_THE_TRAINER = {"make_inputs_require_grads"}
"""A hook that transformers sets for recomputing, and that changes no number."""
_FREE = {"training", "gradient_checkpointing", "name_or_path", "accepts_loss_kwargs"}
"""Attributes that say nothing of what a model computes in training."""
_PLAIN = (bool, int, float, str, tuple, type(None))
_NAMED = 4
"""Differences that a message names."""


def check_unchanged(model: nn.Module, built: nn.Module) -> None:
    """Raise ConfigError where a model is another one than its config builds.

    Compared are the kinds of its modules, their plain attributes and functions, the shapes of
    parameters and buffers, which of them are one, and hooks. `built` needs no values.
    """
    found = list(_differences(model, built))
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise ConfigError(
            "model was changed after its config had built it, which its directory does not keep: "
            f"{'; '.join(found[:_NAMED])}{more}. Change the config, or train the module with "
            "swaptrain.train(model=lambda: ...)"
        )


def _differences(model: nn.Module, built: nn.Module) -> Iterator[str]:
    own, other = dict(model.named_modules()), dict(built.named_modules())
    for name in [*own, *(name for name in other if name not in own)]:
        label = name or type(model).__name__
        if name not in other or name not in own:
            yield f"{label} is {'new' if name in own else 'gone'}"
        elif type(own[name]) is not type(other[name]):
            yield f"{label} is {type(own[name]).__name__}, not {type(other[name]).__name__}"
        else:
            for key, now, before in _attributes(own[name], other[name]):
                yield f"{label}.{key} is {now}, not {before}"
    yield from _of_tensors(model, built)
    for name, module in own.items():
        parts: list[tuple[str, Any]] = [(name or "it", module)]
        parts += [(f"{name}.{key}", p) for key, p in module.named_parameters(recurse=False)]
        for label, part in parts:
            twin = other.get(name) if part is module else None
            if any(_hooks(part, kind) - _hooks(twin, kind) for kind in _HOOKS):
                yield f"{label} has hooks"


def _attributes(own: nn.Module, other: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield attributes of a module that differ: plain values, and functions by their names."""
    now, before = vars(own), vars(other)
    for key in now.keys() | before.keys():
        a, b = now.get(key), before.get(key)
        functions = isinstance(a, types.FunctionType | types.MethodType)
        if functions or isinstance(b, types.FunctionType | types.MethodType):
            a, b = (getattr(f, "__qualname__", None) for f in (a, b))
        elif (
            key.startswith("_")
            or key in _FREE
            or not isinstance(a, _PLAIN)
            or not isinstance(b, _PLAIN)
        ):
            continue
        if a != b and not (a != a and b != b):
            yield key, str(a), str(b)


def _of_tensors(model: nn.Module, built: nn.Module) -> Iterator[str]:
    own, other = _tensors(model), _tensors(built)
    for name in own.keys() | other.keys():
        a, b = (None if x.get(name) is None else tuple(x[name].shape) for x in (own, other))
        if a != b:
            yield f"{name} is {a or 'gone'}, not {b or 'there'}"
    if own.keys() == other.keys() and _groups(own) != _groups(other):
        tied = ", ".join("=".join(sorted(group)) for group in _groups(own) ^ _groups(other))
        yield f"other tensors are one: {tied}"


def _tensors(module: nn.Module) -> dict[str, Any]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _groups(tensors: dict[str, Any]) -> set[frozenset[str]]:
    """Return the names of tensors that are one object, where several are."""
    names = defaultdict[int, set[str]](set)
    for name, tensor in tensors.items():
        names[id(tensor)].add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _hooks(part: Any, kind: str) -> set[str]:
    found = (getattr(part, kind, None) or {}).values()
    return {name for f in found if (name := getattr(f, "__name__", repr(f))) not in _OF_THE_TRAINER}
