"""Computes large matrix products, and decodes weights, until it is known how long each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swaptrain.models.quantization import decode
from swaptrain.program.quantized import QuantizedAs

__all__ = ["KnownProducts"]

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)
"""They make new tensors, and take no memory to speak of beside them."""
_ENOUGH_S = 0.5
"""Of computing one product, or decoding one weight: after so long it is left out."""
_LEAST_FLOPS = 1 << 36
"""Of a segment's forward, about a second: it takes no notice of what looking at each call costs."""
_STD = 0.02
"""Of random results: as of many models' initial weights."""


@dataclass
class _Known:
    """What was seen of one operation on arguments of one form."""

    seconds: list[float]
    results: Any = None
    """A result, or several: each one's shape, stride and dtype."""


class KnownProducts:
    """Leaves out what was timed already, for whoever needs times and memory, and no results.

    A segment of nine equal layers is computed in the time of one. What is left out makes its
    results all the same, of zeros, and touches each page of them, so torch takes as much memory as
    if it were computed. `left_out_s` are the seconds that this saved. Segments of less than
    `least_flops` are computed whole.
    """

    def __init__(self, *, enough_s: float = _ENOUGH_S, least_flops: int = _LEAST_FLOPS) -> None:
        self.left_out_s = 0.0
        self.enough_s, self.least_flops = enough_s, least_flops
        self._known: dict[Any, _Known] = {}
        self._generator: torch.Generator | None = None

    @contextmanager
    def on_random_numbers(self) -> Iterator[None]:
        """Make results of random numbers in a `with` block, where zeros would tell nothing."""
        self._generator = torch.Generator().manual_seed(0)
        try:
            yield
        finally:
            self._generator = None

    def left_out(self, flops: int) -> AbstractContextManager[object]:
        """Return a context in which a segment of so many flops is run without what is known."""
        return _LeftOut(self) if flops >= self.least_flops else nullcontext()

    def decode(self, codes: Tensor, scales: Tensor, form: QuantizedAs, target: Tensor) -> None:
        """Decode a weight, or only touch its memory."""
        known = self._known.setdefault(("decode", form, _form(target)), _Known([]))
        begun = time.perf_counter()
        if self._is_enough(known):
            target.fill_(0.0 if self._generator is None else _STD)
            self._leave_out(known, begun)
        else:
            decode(codes, scales, form, target)
            known.seconds.append(time.perf_counter() - begun)

    def product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what an operation gives, or tensors like it."""
        key = func, str(pytree.tree_map(_form, (args, kwargs)))
        known = self._known.setdefault(key, _Known([]))
        begun = time.perf_counter()
        if self._is_enough(known):
            results = pytree.tree_map_only(_TensorForm, self._made, known.results)
            self._leave_out(known, begun)
            return results
        results = func(*args, **kwargs)
        known.seconds.append(time.perf_counter() - begun)
        known.results = pytree.tree_map(_form, results)
        return results

    def _is_enough(self, known: _Known) -> bool:
        return bool(known.seconds) and sum(known.seconds) >= self.enough_s

    def _leave_out(self, known: _Known, begun: float) -> None:
        spent_s = time.perf_counter() - begun
        self.left_out_s += statistics.median(known.seconds) - spent_s

    def _made(self, form: _TensorForm) -> Tensor:
        made = torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
        if self._generator is None:
            return made.zero_()
        return made.normal_(std=_STD, generator=self._generator)


class _LeftOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # a region without gradients, say: its body is seen too

    def __init__(self, products: KnownProducts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _PRODUCTS:
            return self._products.product(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _TensorForm:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _form(leaf: object) -> object:
    """Return what an operation's time depends on: of a tensor not its numbers."""
    if isinstance(leaf, Tensor):
        return _TensorForm(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
    return leaf
