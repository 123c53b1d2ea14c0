"""Which parameters of a captured model are trained, and who keeps the others from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from swaptrain.program.model import ParameterSpec

__all__ = ["Trained", "trained_parameters"]

_MOST = 3
"""How many patterns of names a line lists for each reason."""


@dataclass(frozen=True)
class Trained:
    """How many numbers of a model are trained, and the names of the others by reason."""

    count: int
    total: int
    frozen: Mapping[str, tuple[str, ...]]
    """Names of parameters by what is said of them, such as `frozen by the constructor`."""

    def line(self) -> str:
        """Return it in one line for a person."""
        text = f"{self.count:,} of {self.total:,} parameters are trained"
        for reason, names in self.frozen.items():
            text += f"; {reason}: {_listed(names)}"
        return text


def trained_parameters(
    module: nn.Module,
    parameters: Mapping[str, ParameterSpec],
    made_by: str,
    by_constructor: Collection[str],
) -> Trained:
    """Compare what a module asks to be trained with what its loss reaches.

    `made_by` is who made the module, as a message calls it; `by_constructor` names what it had
    frozen itself, before `train.freeze`.
    """
    frozen: dict[str, list[str]] = {}
    count = 0
    for name, parameter in module.named_parameters():
        if parameters[name].trainable:
            count += parameter.numel()
        elif not (parameter.is_floating_point() or parameter.is_complex()):
            frozen.setdefault("no floating-point numbers", []).append(name)
        elif not parameter.requires_grad:
            by = made_by if name in by_constructor else "train.freeze"
            frozen.setdefault(f"frozen by {by}", []).append(name)
        else:
            frozen.setdefault("the loss does not reach", []).append(name)
    total = sum(parameter.numel() for parameter in module.parameters())
    return Trained(count, total, {reason: tuple(names) for reason, names in frozen.items()})


def _listed(names: tuple[str, ...]) -> str:
    """Return patterns of names, `*` for a number, each with how many names it stands for."""
    patterns: dict[str, list[str]] = {}
    for name in names:
        patterns.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    shown = [
        found[0] if len(found) == 1 else f"{pattern} ({len(found)})"
        for pattern, found in patterns.items()
    ]
    more = f" and {len(shown) - _MOST} more" if len(shown) > _MOST else ""
    return ", ".join(shown[:_MOST]) + more
