"""What plain Python objects remember: a deep, shallowly compared picture of what can be reached."""

from __future__ import annotations

import array
import collections
import itertools
import random
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from swaptrain.capture.guards.draws import state_bytes
from swaptrain.capture.guards.lines import is_own_file

__all__ = ["Picture", "changes", "hook_roots", "model_roots", "reachable"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
_NO_STATE = frozenset(
    (
        *("torch", "logging", "threading", "concurrent", "asyncio", "multiprocessing", "weakref"),
        *("re", "inspect", "typing", "importlib", "os", "io", "swaptrain", "abc", "pathlib"),
        *("functools", "ctypes", "_thread", "warnings", "contextlib", "transformers_modules"),
    )
)
"""Packages whose objects keep nothing that a forward computes with."""
_MODULE_SLOTS = frozenset(vars(nn.Module())) - {"training"}
_MOST_OBJECTS = 2_000_000


@dataclass
class Picture:
    """What was reached, by a path to print."""

    tokens: dict[str, object] = field(default_factory=dict)
    """Of plain values the value, of containers their length, of generators their state."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those in containers, objects and closures; a module's own are left to others."""


def changes(before: Picture, after: Picture) -> dict[str, str]:
    """Return the paths whose tokens differ, with what they were and are."""
    found: dict[str, str] = {}
    for path in before.tokens.keys() | after.tokens.keys():
        old, new = before.tokens.get(path, _ABSENT), after.tokens.get(path, _ABSENT)
        if old != new:
            found[path] = f"{_short(old)} -> {_short(new)}"
    return found


def model_roots(model: nn.Module) -> dict[str, object]:
    """Return what the state of a forward may hang on: the model, its classes, their modules."""
    roots: dict[str, object] = {"self": model}
    waiting: list[str] = []
    for part in model.modules():
        for cls in type(part).__mro__:
            module = sys.modules.get(cls.__module__)
            file = getattr(module, "__file__", None)
            if module is None or not is_own_file(file, installed=True):
                continue
            roots.setdefault(cls.__qualname__, _Attributes(cls))
            waiting.append(cls.__module__)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        roots[name] = _Attributes(module)
        for value in list(vars(module).values()):
            if isinstance(value, types.ModuleType) and is_own_file(
                getattr(value, "__file__", None)
            ):
                waiting.append(value.__name__)
            elif isinstance(value, (types.FunctionType, type)):
                other = sys.modules.get(value.__module__ or "")
                if other is not None and is_own_file(getattr(other, "__file__", None)):
                    waiting.append(other.__name__)
    return roots


def hook_roots(hook: object) -> dict[str, object]:
    """Return what the state of a hook may hang on: itself, and the module that defines it."""
    roots: dict[str, object] = {"hook": hook}
    function = getattr(getattr(hook, "func", hook), "__func__", getattr(hook, "func", hook))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and is_own_file(getattr(module, "__file__", None), installed=True):
        roots[module.__name__] = _Attributes(module)
    return roots


def reachable(roots: Mapping[str, object], *, own_tensors: bool = False) -> Picture:
    """Walk from the roots through containers, objects, functions and closures.

    With `own_tensors` those that modules hold are reached, too, but for parameters.
    """
    picture = Picture()
    seen: dict[int, object] = {}  # kept alive, so that no other object gets the same identity
    waiting: list[tuple[str, object]] = list(reversed(list(roots.items())))
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.pop()
        if isinstance(value, (*_PLAIN, Enum)):
            picture.tokens[path] = _plain(value)
            continue
        if isinstance(value, torch.Tensor):
            picture.tensors[path] = value
            picture.tokens[path] = ("tensor", tuple(value.shape), str(value.dtype))
            continue
        if id(value) in seen:
            continue
        seen[id(value)] = value
        token = _token(value)
        if token is not None:
            picture.tokens[path] = token
        waiting.extend(reversed(list(_parts(path, value))))
        if own_tensors and isinstance(value, nn.Module):
            held = {**vars(value), **value._buffers}
            waiting.extend((f"{path}.{n}", t) for n, t in held.items() if torch.is_tensor(t))
    return picture


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()


class _Attributes:
    """Stands for what a class or a Python module holds."""

    def __init__(self, owner: type | types.ModuleType) -> None:
        self.owner = owner


def _plain(value: object) -> object:
    return (type(value).__name__, repr(value)) if isinstance(value, (float, complex)) else value


def _token(value: object) -> object | None:
    """Return what of an object may change without its parts changing."""
    if isinstance(value, (list, tuple, collections.deque, dict)):
        return ("length", len(value))
    if isinstance(value, (set, frozenset)):
        return ("set", len(value), sorted(repr(item) for item in value if isinstance(item, _PLAIN)))
    if isinstance(value, (bytearray, array.array)):
        return xxhash.xxh3_128_hexdigest(bytes(value))
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), xxhash.xxh3_128_hexdigest(value.tobytes()))
    if isinstance(value, np.generic):
        return (str(value.dtype), repr(value))
    if isinstance(value, random.Random):
        return ("state", hash(value.getstate()))
    if isinstance(value, np.random.Generator):
        return ("state", repr(value.bit_generator.state))
    if isinstance(value, np.random.RandomState):
        return ("state", repr(value.get_state()))
    if isinstance(value, torch.Generator):
        return ("state", xxhash.xxh3_128_hexdigest(state_bytes(value)))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        return ("at", None if value.gi_frame is None else value.gi_frame.f_lasti)
    hint = getattr(type(value), "__length_hint__", None)  # of iterators over containers
    return ("left", hint(value)) if hint is not None and isinstance(value, Iterator) else None


def _parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what an object refers to, with its path."""
    if isinstance(value, _Attributes):
        yield from _attributes(path, value.owner)
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            yield f"{path}[{key!r}]" if isinstance(key, _PLAIN) else f"{path}[...]", item
    elif isinstance(value, (list, tuple, collections.deque)):
        for i, item in enumerate(value):
            yield f"{path}[{i}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            if not isinstance(item, _PLAIN):
                yield f"{path}{{...}}", item
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(path, value)
    elif isinstance(value, types.MethodType):
        yield path, value.__func__
        yield path, value.__self__
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from ((f"{path}.{n}", v) for n, v in value.gi_frame.f_locals.items())
    elif isinstance(value, nn.Module):
        yield from _module_parts(path, value)
    elif type(value).__module__ == "functools" and hasattr(value, "keywords"):
        partial: Any = value
        yield path, partial.func
        yield f"{path}.args", partial.args
        yield f"{path}.keywords", partial.keywords
    elif not isinstance(value, (type, types.ModuleType, np.ndarray)) and _keeps_state(value):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield f"{path}.{name}", item
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _keeps_state(value: object) -> bool:
    return type(value).__module__.partition(".")[0] not in _NO_STATE


def _attributes(path: str, owner: type | types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yield what a class or a module holds and defines itself; imported code is left out."""
    name = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    for key, value in list(vars(owner).items()):
        if key.startswith("__"):
            continue
        inner = getattr(value, "__func__", value)  # class and static methods
        if isinstance(inner, (type, types.ModuleType, property)):
            continue
        if isinstance(inner, types.FunctionType) and inner.__module__ != name:
            continue
        yield f"{path}.{key}", inner


def _function_parts(path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, value in vars(function).items():
        if name != "__wrapped__":
            yield f"{path}.{name}", value
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=False):
        try:
            yield f"{path}.<{name}>", cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    yield f"{path}.<defaults>", function.__defaults__ or ()
    yield f"{path}.<defaults>", function.__kwdefaults__ or {}


def _module_parts(path: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield a module's own attributes and its submodules; its own tensors are left to others."""
    for name, value in vars(module).items():
        if name in _MODULE_SLOTS or isinstance(value, torch.Tensor):
            continue
        yield f"{path}.{name}", value
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for hook in hooks.values():
            yield f"{path}.<forward hook>", hook
    for name, child in module._modules.items():
        if child is not None:
            yield f"{path}.{name}", child


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _short(value: object) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]} {value[1]}" if value[0] in ("length", "left") else str(value[1])
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
