"""Which of torch's optimizers can be used, with which arguments, and what state each one keeps."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from swaptrain.errors import ConfigError

__all__ = [
    "ELEMENTWISE",
    "MeasuredStateShapes",
    "optimizer_arguments",
    "optimizer_class",
    "takes_argument",
]

ELEMENTWISE = frozenset(
    {
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Classes whose step on blocks of a parameter equals the step on the whole, bit for bit (tested).

A class that is not in the list gets whole parameters, which is always right.
"""

_IN_THE_GROUP = (
    "it keeps numbers for all parameters together, which change with each of them, and here one "
    "parameter is updated at a time; use adamw"
)
REFUSED_ELSEWHERE = {
    "schedulefree": _IN_THE_GROUP,
    "prodigy": _IN_THE_GROUP,
    "dadapt": _IN_THE_GROUP,
    "mechanic": _IN_THE_GROUP,
    "cocob": _IN_THE_GROUP,
}
"""Optimizers of other packages that cannot be had, by the beginning or the end of their names."""
REFUSED = {
    "LBFGS": "it evaluates the model several times in one step and keeps one state for all "
    "parameters; use adamw",
    "SparseAdam": "it takes sparse gradients, and swaptrain's are dense; use adam",
}

OWN_KEYS = {
    "lr": "set optimizer.lr",
    "params": "the model's parameters are used",
    "weight_decay": "set optimizer.weight_decay",
    "capturable": "swaptrain chooses it; remove it",
    "differentiable": "swaptrain does not differentiate through the update; remove it",
    "foreach": "swaptrain chooses the implementation; remove it",
    "fused": "swaptrain chooses the implementation; remove it",
}

# Two sets without a common prime, so that every extent of a state tensor can be traced back.
PROBES = ((2, 3, 5, 7, 11, 13), (3, 5, 2, 11, 7, 17))


def known_optimizers() -> dict[str, type[Optimizer]]:
    """Return torch's optimizer classes by lower-case name."""
    members = inspect.getmembers(torch.optim, inspect.isclass)
    return {
        name.lower(): member
        for name, member in members
        if issubclass(member, Optimizer) and member is not Optimizer
    }


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of torch.optim with this name, in any case.

    Raises:
        ConfigError: there is none, or its state is not kept per parameter.
    """
    known = known_optimizers()
    found = known.get(name.lower())
    usable = {key: cls for key, cls in known.items() if cls.__name__ not in REFUSED}
    if found is None:
        plain = name.lower().replace("_", "").replace("-", "")
        for stem, reason in REFUSED_ELSEWHERE.items():
            if stem in plain:
                raise ConfigError(f"optimizer.name: {name} cannot be used: {reason}")
        nearest = difflib.get_close_matches(name.lower(), usable, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(
            f"optimizer.name: torch.optim has no {name!r}; {hint}Use one of "
            f"{', '.join(sorted(usable))}"
        )
    if found.__name__ in REFUSED:
        raise ConfigError(f"optimizer.name: {name} cannot be used: {REFUSED[found.__name__]}")
    return found


def takes_argument(cls: type[Optimizer], name: str) -> bool:
    """Return whether the constructor of `cls` has an argument of this name."""
    return name in inspect.signature(cls).parameters


def optimizer_arguments(
    cls: type[Optimizer], *, weight_decay: float | None, arguments: Mapping[str, object]
) -> dict[str, object]:
    """Return the keyword arguments for the constructor of `cls`, without `params` and `lr`.

    `fused=True` is added where the class has it; lists become tuples; a `weight_decay` of None
    leaves the class's default.

    Raises:
        ConfigError: the class has no such argument (all of them are named), or refuses its value.
    """
    allowed = [key for key in inspect.signature(cls).parameters if key not in OWN_KEYS]
    problems = []
    for key in arguments:
        if key in OWN_KEYS:
            problems.append(f"optimizer.{key}: not an argument of its own: {OWN_KEYS[key]}")
        elif key not in allowed:
            nearest = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it has {', '.join(allowed)}"
            problems.append(f"optimizer.{key}: {cls.__name__} has no such argument; {hint}")
    if weight_decay is not None and not takes_argument(cls, "weight_decay"):
        problems.append(
            f"optimizer.weight_decay: {cls.__name__} has no weight decay; set it to null"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    chosen = {
        key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    if weight_decay is not None:
        chosen["weight_decay"] = weight_decay
    if takes_argument(cls, "fused"):
        chosen["fused"] = True
    return chosen


class MeasuredStateShapes:
    """The names and shapes of what an optimizer keeps per parameter, found by running it.

    torch says nowhere what state a class keeps, and it depends on the arguments (momentum,
    amsgrad) and on the number of dimensions (Adafactor). So one step is made on tiny parameters
    whose extents are different primes, twice, and every extent of the state is traced back to the
    dimensions whose product it is, or to a constant.
    """

    def __init__(self, make: Callable[[list[Tensor]], Optimizer]) -> None:
        """`make` returns a new optimizer of the given parameters."""
        self._make = make
        self._rules: dict[int, dict[str, tuple[int | tuple[int, ...], ...]]] = {}
        self._keeps_step: dict[int, bool] = {}

    def keeps_step(self, dimensions: int) -> bool:
        """Return whether torch keeps the number of updates in the state, as `step`."""
        self._rules_of(dimensions)
        return self._keeps_step[dimensions]

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each float32 state tensor of a parameter of this shape.

        Raises:
            ConfigError: the optimizer refuses such a parameter, or keeps other things than tensors.
        """
        return {
            name: tuple(
                extent if isinstance(extent, int) else math.prod(shape[i] for i in extent)
                for extent in extents
            )
            for name, extents in self._rules_of(len(shape)).items()
        }

    def _rules_of(self, dimensions: int) -> dict[str, tuple[int | tuple[int, ...], ...]]:
        """Return per name the extents: a constant, or the dimensions whose product it is."""
        if dimensions not in self._rules:
            if dimensions > len(PROBES[0]):
                # Extents of more dimensions would make the probe large; such parameters are rare.
                raise ConfigError(
                    f"a parameter has {dimensions} dimensions; at most {len(PROBES[0])} are "
                    "supported: reshape it in the model"
                )
            first, second = (self._probe(primes[:dimensions]) for primes in PROBES)
            self._rules[dimensions] = {
                name: tuple(
                    trace_extent(a, b, dimensions)
                    for a, b in zip(first[name], second[name], strict=True)
                )
                for name in first
            }
        return self._rules[dimensions]

    def _probe(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Make one step on a parameter of this shape and return the shapes of its state."""
        parameter = torch.ones(shape)
        parameter.grad = torch.ones(shape)
        try:
            optimizer = self._make([parameter])
            optimizer.step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer.name: torch cannot update a {len(shape)}-dimensional parameter with "
                f"this optimizer: {error}; use adamw, for those alone by optimizer.groups: "
                "[{match: [...], name: adamw}]"
            ) from error
        state = dict(optimizer.state[parameter])
        self._keeps_step[len(shape)] = state.pop("step", None) is not None
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.dtype != torch.float32:
                raise ConfigError(
                    f"optimizer.name: {type(optimizer).__name__} cannot be used: it keeps {key!r}, "
                    "which is not a float32 tensor; use adamw"
                )
        return {key: tuple(value.shape) for key, value in state.items()}


def trace_extent(first: int, second: int, dimensions: int) -> int | tuple[int, ...]:
    """Return the dimensions whose product gave `first` and `second`, or the constant that both are.

    Raises:
        ConfigError: the two probes disagree.
    """
    if first == second == 1:
        return 1
    found = [
        tuple(i for i, prime in enumerate(primes[:dimensions]) if extent % prime == 0)
        for primes, extent in zip(PROBES, (first, second), strict=True)
    ]
    exact = math.prod(PROBES[0][i] for i in found[0]) == first
    if found[0] == found[1] and exact:
        return found[0]
    if first == second:
        return first
    raise ConfigError(
        "optimizer.name: the shape of its state does not follow from the parameter's; use adamw"
    )
