"""Records the checks that a model makes with torch's functions while it is exported."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from swaptrain.capture.checks.operation import CHECK

__all__ = ["recorded_checks"]

_FAKE = re.compile(r"FakeTensor\(\.\.\..*?\)(?:, dtype=[\w.]+\))?|\b[usz][uf]?\d+\b")


@contextlib.contextmanager
def recorded_checks() -> Iterator[None]:
    """Make torch's checks of tensors and of unknown numbers nodes that carry the model's message.

    Without this an export turns a check of a tensor into a chain of scalar operations that lacks
    the message, or asks for a value that an export does not have.
    """
    check_with: Any = torch._check_with
    assert_: Any = torch._assert

    def tensor_all_with(
        error_type: type[Exception], cond: Any, message: Callable[[], str] | None = None
    ) -> None:
        if not isinstance(cond, torch.Tensor):
            raise TypeError(f"cond must be a tensor, but got {type(cond)}")
        if cond.dtype != torch.bool:
            raise TypeError(f"cond tensor must have dtype torch.bool, but got {cond.dtype}")
        if get_proxy_mode() is None:
            check_with(error_type, bool(cond.all()), message)
        else:
            CHECK(cond, _text(message))

    def with_type(
        error_type: type[Exception], cond: Any, message: Callable[[], str] | None = None
    ) -> None:
        check_with(error_type, cond, message)
        if isinstance(cond, torch.SymBool) and get_proxy_mode() is not None:
            _record_number(cond, _text(message))

    def plain(condition: Any, message: str) -> None:
        if isinstance(condition, torch.Tensor) and get_proxy_mode() is not None:
            CHECK(condition.bool(), _text(message))
        else:
            assert_(condition, message)

    replaced = {
        "_check_tensor_all_with": tensor_all_with,
        "_check_with": with_type,
        "_assert": plain,
    }
    originals = {name: getattr(torch, name) for name in replaced}
    for name, function in replaced.items():
        setattr(torch, name, function)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)


def _record_number(condition: torch.SymBool, message: str) -> None:
    """Add the check to the graph: dispatch does not see an operation without tensors."""
    mode = get_proxy_mode()
    assert mode is not None
    tracer = mode.tracer
    proxy = get_proxy_slot(condition, tracer).force()
    tracer.create_proxy("call_function", CHECK, (proxy, message), {}).node.meta["val"] = None


def _text(message: object) -> str:
    """Return the model's message; a value in it, which an export does not have, becomes "?"."""
    try:
        found = str(message() if callable(message) else message)
    except Exception:  # the model's own code, on values that are not there
        found = "the condition is false (its message needs values that a capture does not have)"
    if message is None:
        found = "the condition is false"
    return _FAKE.sub("?", found)
