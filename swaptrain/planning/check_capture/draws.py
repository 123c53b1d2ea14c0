"""Gives the plain model and the captured graph the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SameDraws", "python_draws"]


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds torch's generator before each operation that draws: by the step, kind and shape.

    The seed depends on nothing else, so that an operation draws the same in a recomputation, in
    plain PyTorch and in a segment. A mask that a forward keeps for the next one differs all the
    same: it was drawn in another step. What brings a generator of its own is left alone.
    """

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            described = [_described(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
            digest = xxhash.xxh3_64_intdigest(f"{self._step} {func} {described}".encode())
            torch.default_generator.manual_seed(digest >> 1)
        return func(*args, **kwargs)


def _described(leaf: object) -> str:
    return str(tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf)


def python_draws() -> tuple[object, ...]:
    """Return where Python's and numpy's global generators stand."""
    numpy: Mapping[str, Any] = np.random.get_state(legacy=False)
    state = numpy["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"], numpy["has_gauss"]
