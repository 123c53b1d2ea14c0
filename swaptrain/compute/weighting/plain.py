"""The weights of tokens in plain PyTorch: what `swaptrain.reference` does to an eager model.

A mode of torch hears of every call of `cross_entropy` and `nll_loss`, and follows what comes of it
through sums, products with numbers and casts: no graph is captured. Means over tokens that a model
writes by hand are not known to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from swaptrain.capture.losses.weighting import StepWeights
from swaptrain.errors import ConfigError

__all__ = ["CountedCalls", "WeightedCalls"]

_ENTROPIES: tuple[Callable[..., Any], ...] = (F.cross_entropy, F.nll_loss)
_ADDED = {"add", "sub", "rsub", "add_", "sub_"}
_SAME = {"mul", "div", "true_divide", "mul_", "div_", "neg", "to", "float", "double", "type"}
_SAME |= {"view", "reshape", "squeeze", "unsqueeze", "clone", "contiguous", "sum", "mean"}
_ASKED = {"__get__", "size", "dim", "numel", "detach", "is_floating_point", "stride", "item"}
"""What only looks at a tensor."""


class CountedCalls(TorchFunctionMode):
    """Notes what each cross entropy of a forward that is a mean counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float] = []
        """In the order of the calls: trained tokens, or the sum of their classes' weights."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Count where it is a mean over class numbers."""
        if func in _ENTROPIES and (given := _mean_call(func, args, kwargs or {})) is not None:
            targets, weight = given["target"], given["weight"]
            trained = targets[targets != given["ignore_index"]]
            count = len(trained) if weight is None else weight.double()[trained].sum()
            self.counts.append(float(count))
        return func(*args, **(kwargs or {}))


class WeightedCalls(TorchFunctionMode):
    """Makes each of these cross entropies its micro-batch's part of the step's loss."""

    def __init__(self, weights: StepWeights) -> None:
        super().__init__()
        self._weights = weights
        self._parts: dict[int, Tensor] = {}
        """What comes of a cross entropy, by its id."""
        self._calls = 0

    def check(self, loss: Tensor) -> None:
        """Raise ConfigError unless the loss is a sum of these parts."""
        if id(loss) not in self._parts:
            raise ConfigError(
                "the plain loop cannot weight tokens: the loss is no sum with a cross entropy"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Weight a cross entropy, and what is added to one."""
        kwargs = kwargs or {}
        if func in _ENTROPIES and (given := _mean_call(func, args, kwargs)) is not None:
            return self._part(self._entropy(func, given))
        first = args[0] if args else None
        operands = list(first) if isinstance(first, list | tuple) else list(args)
        if not any(id(operand) in self._parts for operand in operands):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        short = name.strip("_") if name.startswith("__") and name != "__get__" else name
        short = {"radd": "add", "iadd": "add_", "isub": "sub_", "rmul": "mul", "imul": "mul_",
                 "truediv": "div", "itruediv": "div_"}.get(short, short)  # fmt: skip
        if short in _ASKED:
            return func(*args, **kwargs)
        if short in _ADDED:
            return self._part(func(*self._shares(operands), **kwargs))
        if short in ("stack", "cat"):
            return self._part(func(self._shares(operands), *args[1:], **kwargs))
        if short in _SAME:
            return self._part(func(*args, **kwargs))
        raise ConfigError(
            f"the plain loop cannot weight tokens: {name} is no sum of the loss's terms"
        )

    def _part(self, result: Tensor) -> Tensor:
        self._parts[id(result)] = result
        return result

    def _shares(self, operands: Iterable[Any]) -> list[Any]:
        """Divide by M what does not come of a cross entropy."""
        m = self._weights.micro_batches
        return [o if id(o) in self._parts or o == 0 else o / m for o in operands]

    def _entropy(self, func: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        total = self._weights.totals[self._calls]
        self._calls += 1
        if total is None:
            return func(**given) / self._weights.micro_batches
        return func(**given | {"reduction": "sum"}) / total


def _mean_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call that is a mean over class numbers, else None."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    is_mean = given["reduction"] == "mean" and given["reduce"] is None
    return given if is_mean and not torch.is_floating_point(given["target"]) else None
