"""What plain Python objects remember: a deep, shallowly compared picture of what can be reached."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from swaptrain.capture.guards.lines import is_own_file
from swaptrain.capture.guards.tokens import PLAIN, keeps_state, plain_token, token_of

__all__ = ["Picture", "changes", "hook_roots", "model_roots", "reachable"]

_MODULE_SLOTS = frozenset(vars(nn.Module())) - {"training"}
_MOST_OBJECTS = 2_000_000
_FAKE = frozenset(dir(FakeTensor)) | frozenset(FakeTensor.__annotations__)
"""Attributes that tensors have while a forward is exported."""
_SHOWN = (types.ModuleType, types.FunctionType, types.MethodType, type, nn.Module, np.ndarray)
"""What shows its attributes in another way, or has none of its own."""


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
    roots: dict[str, object] = {"self": model, "os.environ": os.environ}
    waiting: list[str] = []
    for part in model.modules():
        for cls in type(part).__mro__:
            module = sys.modules.get(cls.__module__)
            file = getattr(module, "__file__", None)
            if module is None or not is_own_file(file, installed=True):
                continue
            roots.setdefault(cls.__qualname__, cls)
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
    seen: dict[int, tuple[object, str]] = {}  # kept alive: no other object gets the same identity
    same: collections.Counter[str] = collections.Counter()
    waiting: list[tuple[str, object]] = list(reversed(list(roots.items())))
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value = waiting.pop()
        if path in picture.tokens:  # two keys of a dict, two variables of one name
            same[path] += 1
            path = f"{path}#{same[path]}"
        if isinstance(value, PLAIN):
            picture.tokens[path] = plain_token(value)
            continue
        if isinstance(value, torch.Tensor):
            picture.tensors[path] = value
            picture.tokens[path] = ("tensor", tuple(value.shape), str(value.dtype))
            waiting.extend(_tensor_parts(path, value))
            continue
        if isinstance(value, Enum):
            picture.tokens[path] = value
        if id(value) in seen:
            if not isinstance(value, (Enum, type)):
                picture.tokens[path] = ("the same as", seen[id(value)][1])
            continue
        seen[id(value)] = value, path
        token = token_of(value)
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
    """Stands for what a Python module holds."""

    def __init__(self, owner: types.ModuleType) -> None:
        self.owner = owner


def _parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what an object refers to, with its path, and its classes."""
    yield from _classes(value)
    if isinstance(value, _Attributes):
        yield from _attributes(path, value.owner)
    elif isinstance(value, (dict, os._Environ)):
        for key, item in list(value.items()):
            yield f"{path}[{key!r}]" if isinstance(key, PLAIN) else f"{path}[...]", item
    elif isinstance(value, (list, tuple, collections.deque)):
        for i, item in enumerate(value):
            yield f"{path}[{i}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            if not isinstance(item, PLAIN):
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
    elif isinstance(value, type):
        if _is_own_class(value):
            yield from _attributes(path, value)
    elif type(value).__module__ == "functools" and hasattr(value, "keywords"):
        partial: Any = value
        yield path, partial.func
        yield f"{path}.args", partial.args
        yield f"{path}.keywords", partial.keywords
    elif isinstance(value, property):
        yield from ((path, f) for f in (value.fget, value.fset, value.fdel) if f is not None)
    else:
        yield from _standard_parts(path, value)
    if isinstance(value, threading.local) or (keeps_state(value) and not isinstance(value, _SHOWN)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield f"{path}.{name}", item
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _standard_parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what objects of the standard library hold without an attribute that shows it."""
    if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
        yield path, value.__self__
    elif isinstance(value, contextvars.ContextVar):
        yield path, value.get(None)
    elif isinstance(value, SynchronizedBase):
        yield path, value.get_obj()
    elif (
        isinstance(value, Iterator)
        and type(value).__module__ in ("builtins", "itertools")
        and not hasattr(value, "__length_hint__")
    ):
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(TypeError):
            yield path, value.__reduce__()  # the iterators below, and the place


def _is_own_class(value: type) -> bool:
    module = sys.modules.get(value.__module__)
    return is_own_file(getattr(module, "__file__", None), installed=True)


def _classes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the classes of an object, and theirs, where they are no library's."""
    if type(value).__module__ == "builtins":
        return
    for cls in (*type(value).__mro__, type(type(value))):
        if _is_own_class(cls):
            yield cls.__qualname__, cls


def _tensor_parts(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, object]]:
    """Yield the plain values that somebody has set on a tensor."""
    for name, item in vars(tensor).items():
        if isinstance(item, PLAIN) and not name.startswith("_") and name not in _FAKE:
            yield f"{path}.{name}", item


def _attributes(path: str, owner: type | types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yield what a class or a module holds and defines itself; imported code is left out."""
    name = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    for key, value in list(vars(owner).items()):
        if key.startswith("__"):
            continue
        inner = getattr(value, "__func__", value)  # class and static methods
        if isinstance(inner, types.ModuleType):
            continue
        if isinstance(inner, (types.FunctionType, type)) and inner.__module__ != name:
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
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield from _tensor_parts(f"{path}.{name}", tensor)
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
