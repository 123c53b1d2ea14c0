"""What of a Python object may change without its parts changing: a token to compare."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import queue
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from swaptrain.capture.guards.draws import state_bytes

__all__ = ["PLAIN", "keeps_state", "plain_token", "token_of"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
_NO_STATE = frozenset(
    (
        *("torch", "logging", "threading", "concurrent", "asyncio", "multiprocessing", "weakref"),
        *("re", "inspect", "typing", "importlib", "os", "io", "swaptrain", "abc", "pathlib"),
        *("functools", "ctypes", "_thread", "warnings", "contextlib", "transformers_modules"),
    )
)
"""Packages whose objects keep nothing that a forward computes with."""
_CODE = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(types.MethodWrapperType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(property, staticmethod, classmethod, types.CodeType, types.MappingProxyType),
)


def keeps_state(value: object) -> bool:
    """Whether an object is not of a package whose objects keep nothing to compute with."""
    return type(value).__module__.partition(".")[0] not in _NO_STATE


def plain_token(value: object) -> object:
    """Return a plain value, so that NaN equals itself and 1 is not 1.0."""
    return (type(value).__name__, repr(value)) if isinstance(value, (float, complex)) else value


def token_of(value: object) -> object | None:
    """Return what of an object may change without its parts changing; None where nothing may."""
    if isinstance(value, (list, tuple, collections.deque, dict)):
        return ("length", len(value))
    if isinstance(value, (set, frozenset)):
        return ("set", len(value), sorted(repr(item) for item in value if isinstance(item, PLAIN)))
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
    if isinstance(value, types.GeneratorType):
        return ("at", None if value.gi_frame is None else value.gi_frame.f_lasti)
    return _iterator_token(value) or _leaf_token(value)


def _iterator_token(value: object) -> object | None:
    if isinstance(value, itertools.count):
        return repr(value)
    hint = getattr(type(value), "__length_hint__", None)  # of iterators over containers
    if hint is None or not isinstance(value, Iterator):
        return None
    with contextlib.suppress(TypeError):  # itertools.repeat without an end
        return ("left", hint(value))
    return None


def _leaf_token(value: object) -> object | None:
    """Return the value of an object written in C, which shows no attributes."""
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return ("at", value.tell(), hash(value.getvalue())) if not value.closed else "closed"
    if isinstance(value, io.IOBase):
        return _file_token(value)
    if isinstance(value, queue.SimpleQueue):
        return ("length", value.qsize())
    if isinstance(value, _CODE):
        return None
    with contextlib.suppress(TypeError, ValueError, BufferError):  # bytearray, array, mmap, ctypes
        buffer: Any = value
        return xxhash.xxh3_128_hexdigest(memoryview(buffer).tobytes())
    cls = type(value)
    if hasattr(value, "__dict__"):
        return None
    if cls.__hash__ in (None, object.__hash__) or cls.__repr__ is object.__repr__:
        return None
    return repr(value) if keeps_state(value) and not isinstance(value, Iterator) else None


def _file_token(value: io.IOBase) -> object | None:
    """Return the place in a file that is only read; a log grows, and nothing computes with it."""
    with contextlib.suppress(OSError, ValueError):
        if value.readable() and not value.writable() and value.seekable():
            return ("at", value.tell())
    return None
