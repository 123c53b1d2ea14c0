"""What a few numbers say of an item: other content shows, another machine's last bits do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import torch
import xxhash

__all__ = ["is_alike", "sketch", "sketches"]

_READ_S = 1.0
"""Seconds after which no further item is read; the first one is in any case."""
_RELATIVE = 1e-3


def sketches(
    read: Callable[[int], Mapping[str, torch.Tensor]], length: int
) -> dict[str, dict[str, Any]]:
    """Return the sketches of four items over the length, by their numbers."""
    found: dict[str, dict[str, Any]] = {}
    began = monotonic()
    for number in dict.fromkeys((0, length // 3, 2 * length // 3, length - 1)):
        if found and monotonic() - began > _READ_S:
            break
        found[str(number)] = sketch(read(number))
    return found


def sketch(item: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a digest of each tensor of whole numbers, and three means of any other, by key.

    The means are of the values, their sizes, and the values weighted by 1/n, in float64.
    """
    return {key: _of(tensor) for key, tensor in sorted(item.items())}


def is_alike(left: Any, right: Any) -> bool:
    """Whether two parts of sketches are of the same content; means may differ by rounding."""
    if not (isinstance(left, list) and isinstance(right, list) and len(left) == len(right) == 3):
        return bool(left == right)
    if not all(isinstance(value, int | float) for value in (*left, *right)):
        return False
    size = max(abs(left[1]), abs(right[1]))
    return all(
        math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_RELATIVE * size)
        for a, b in zip(left, right, strict=True)
    )


def _of(tensor: torch.Tensor) -> str | list[float]:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return xxhash.xxh3_64_hexdigest(content)
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    values = parts.reshape(-1).double().nan_to_num()
    if not values.numel():
        return ""
    weights = torch.arange(1, values.numel() + 1, dtype=torch.float64).reciprocal()
    means = values.mean(), values.abs().mean(), (values * weights).sum() / weights.sum()
    return [float(mean) for mean in means]
