"""Draws of a forward that are not torch's own: found by their generators' states, or refused."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from swaptrain.capture.guards.lines import called_by_model, is_models_file, model_line
from swaptrain.capture.guards.replaced import holders_of, replaced
from swaptrain.errors import CaptureError

__all__ = [
    "Noted",
    "drawn_from",
    "generator_states",
    "refuse_draws",
    "state_bytes",
    "watched_draws",
]

_ENTROPY: tuple[Callable[..., Any], ...] = (
    os.urandom, secrets.token_bytes, secrets.token_hex, secrets.randbelow, secrets.choice,
    secrets.randbits, uuid.uuid4, uuid.uuid1, os.getpid, os.getppid, threading.get_ident,
    threading.get_native_id,
)  # fmt: skip
_CLOCKS: tuple[Callable[[], Any], ...] = (
    time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic,
    time.monotonic_ns,
)  # fmt: skip
_CURE = (
    "a captured graph would use that one draw for ever. Use torch.rand, torch.bernoulli and the "
    "like, which the graph draws anew for every micro-batch"
)


@dataclass
class Noted:
    """What a forward asked for while it was watched."""

    draws: list[str] = field(default_factory=list)
    """Functions that drew from a global generator, with their lines."""
    names: set[str] = field(default_factory=set)
    """What the functions of the model that drew read: names of attributes, and texts."""
    clock: str | None = None
    """The line that asked for the time first."""


def generator_states() -> dict[str, Any]:
    """Return the states of the three global generators, by a name to print."""
    numpys: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "Python's random": random.getstate(),
        "numpy.random": (numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["gauss"]),
        "torch's generator": state_bytes(torch.default_generator),
    }


def state_bytes(generator: torch.Generator) -> bytes:
    """Return the state of a torch generator; also while tensors are fake."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        found: bytes = generator.get_state().numpy().tobytes()
    return found


def drawn_from(before: dict[str, Any]) -> str | None:
    """Return the name of a generator whose state is another one than it was."""
    now = generator_states()
    return next((name for name, state in before.items() if now[name] != state), None)


def refuse_draws(before: dict[str, Any], noted: Noted, model: nn.Module) -> None:
    """Raise CaptureError where a forward has moved a global generator on."""
    name = drawn_from(before)
    if name is None:
        return
    where = noted.draws[0] if noted.draws else "somewhere in it"
    raise CaptureError(f"the forward draws from {name}: {where}: {_CURE}{_by_config(noted, model)}")


@contextlib.contextmanager
def watched_draws(noted: Noted) -> Iterator[None]:
    """Refuse entropy in the model's code by its line; note draws and questions for the time.

    The clocks are shifted by another amount in each forward, so that one whose computation depends
    on the time computes something else.
    """
    functions = (*_ENTROPY, np.random.default_rng, *_CLOCKS, *_global_draws())
    shift_s = int.from_bytes(os.urandom(3), "little") + 0.377
    with contextlib.ExitStack() as stack:
        for function, places in zip(functions, holders_of(functions), strict=True):
            if function in _CLOCKS:
                replacement = _shifted(function, noted, shift_s)
            elif function in _ENTROPY or function is np.random.default_rng:
                replacement = _refusing(function, unless_seeded=function is np.random.default_rng)
            else:
                replacement = _noting(function, noted)
            stack.enter_context(replaced(places, replacement))
        begin = _refusing(random.Random.__init__, unless_seeded=True, own=1)
        stack.enter_context(replaced([(random.Random, "__init__")], begin))
        stack.enter_context(replaced([(np.random, "RandomState")], _seeded_state()))
        yield


def _global_draws() -> list[Callable[..., Any]]:
    """Return the functions of `random` and `numpy.random` that draw from a global generator."""
    owners = ((random, getattr(random, "_inst", None)), (np.random, np.random.mtrand._rand))
    return [
        value
        for module, generator in owners
        for name, value in list(vars(module).items())
        if generator is not None
        and getattr(value, "__self__", None) is generator
        and name not in ("getstate", "get_state", "setstate", "set_state")
    ]


def _noting(function: Callable[..., Any], noted: Noted) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        noted.draws.append(f"{function.__name__} at {model_line()}")
        frame: FrameType | None = sys._getframe(1)
        for _ in range(6):
            if frame is None:
                break
            if is_models_file(frame.f_code.co_filename):
                code = frame.f_code
                noted.names.update(code.co_names)
                noted.names.update(c for c in code.co_consts if isinstance(c, str))
            frame = frame.f_back
        return function(*args, **kwargs)

    return call


def _seeded_state() -> type:
    """Return numpy's old generator as a class that asks for a seed."""

    class RandomState(np.random.RandomState):
        __init__ = _refusing(np.random.RandomState.__init__, unless_seeded=True, own=1)

    found: type = RandomState
    return found


def _refusing(
    function: Callable[..., Any], *, unless_seeded: bool, own: int = 0
) -> Callable[..., Any]:
    """Refuse a call from the model's code, or only one without a seed after `own` arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = (*args[own:], *kwargs.values())
        seeded = unless_seeded and any(value is not None for value in given)
        if called_by_model(1) and not seeded:
            name = getattr(function, "__qualname__", str(function)).removesuffix(".__init__")
            name = f"{getattr(function, '__module__', None) or 'numpy.random'}.{name}"
            raise CaptureError(f"the forward draws from {name} at {model_line()}: {_CURE}")
        return function(*args, **kwargs)

    return call


def _shifted(function: Callable[[], Any], noted: Noted, shift_s: float) -> Callable[[], Any]:
    whole = function.__name__.endswith("_ns")

    def call() -> Any:
        if not called_by_model(1) or _is_collecting():
            return function()
        noted.clock = noted.clock or f"time.{function.__name__} at {model_line()}"
        return function() + (int(shift_s * 1e9) if whole else shift_s)

    return call


def _is_collecting() -> bool:
    """Whether a callback of the garbage collector runs, which may ask for the time anywhere."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def _by_config(noted: Noted, model: nn.Module) -> str:
    """Name the keys of a transformers config that the functions which drew have read."""
    config = getattr(model, "config", None)
    keys = vars(config).keys() if config is not None and hasattr(config, "__dict__") else set()
    read = sorted(name for name in keys & noted.names if getattr(config, name, None))
    if not read:
        return ""
    return (
        f". That code reads these keys of the model's config: {', '.join(read)}. Where one of them "
        "turns the draws off (as apply_spec_augment: false, or a probability of 0, does), set it "
        "under model.hf"
    )
