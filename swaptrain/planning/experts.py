"""Which stacks of experts are divided into ranges, and into how large ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from swaptrain.capture.evaluation.graph import UncutEvaluation
from swaptrain.capture.experts.divide import divide, divide_evaluation, stacks_of_experts
from swaptrain.capture.uncut import Uncut
from swaptrain.compute.update import Rules
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.models.build import BuiltModel
from swaptrain.program.expert_ranges import expert_ranges
from swaptrain.program.model import ParameterSpec

__all__ = ["ExpertRanges"]

_FUSED_ELEMENTS = 16
"""A fused optimizer gives the bits of the whole from multiples of so many elements on."""
_CODED_ELEMENTS = 256
"""A block of 8-bit state, and four of nf4: the codes of a range are those of the whole."""


class ExpertRanges:
    """Divides the stacks of experts of a captured model, for each size of ranges only once."""

    def __init__(
        self,
        config: Config,
        built: BuiltModel,
        rules: Rules,
        state_bytes: Callable[[ParameterSpec], int],
    ) -> None:
        """`state_bytes` is what a parameter takes on disk."""
        self._config, self._built, self._rules = config, built, rules
        self._state_bytes = state_bytes
        self._divided: dict[int | None, tuple[Uncut, Sequence[UncutEvaluation]]] = {
            None: (built.uncut, built.evaluations)
        }

    def fitting(self, target_bytes: int) -> int | None:
        """Return how many experts of each stack are about as large as a segment of this size.

        Or as the largest of the other parameters: memory has to hold that one too. None where each
        stack is small enough as it is.
        """
        least: int | None = None
        own_bytes = max(target_bytes, self._largest_other_bytes)
        for spec in self._stacks.values():
            experts, size_bytes = spec.tensor.shape[0], self._state_bytes(spec)
            if size_bytes > max(2 * target_bytes, own_bytes) and experts > 1:
                most = max(1, min(experts - 1, experts * own_bytes // size_bytes))
                found = _even(experts, most)
                least = found if least is None else min(least, found)
        return least

    def divided(self, experts: int | None) -> tuple[Uncut, Sequence[UncutEvaluation]]:
        """Return the graphs with ranges of so many experts at the most; None: as they are.

        Raises ConfigError where the model has no stack that can be divided.
        """
        if experts not in self._divided:
            assert experts is not None
            ranges = {
                name: tuple(expert_ranges(name, spec.tensor.shape[0], experts))
                for name, spec in self._stacks.items()
                if spec.tensor.shape[0] > experts
            }
            if not self._stacks:
                raise ConfigError(self._why_none(experts))
            if not ranges:  # one of each stack would hold it
                return self._divided[None]
            self._divided[experts] = (
                divide(self._built.uncut, ranges),
                [divide_evaluation(each, ranges) for each in self._built.evaluations],
            )
        return self._divided[experts]

    @cached_property
    def _found(self) -> Mapping[str, ParameterSpec]:
        return stacks_of_experts(self._built.uncut, self._built.evaluations)

    @cached_property
    def _stacks(self) -> Mapping[str, ParameterSpec]:
        return {name: spec for name, spec in self._found.items() if self._keeps_bits(spec)}

    @cached_property
    def _largest_other_bytes(self) -> int:
        parameters = self._built.uncut.parameters
        others = parameters.keys() - self._stacks.keys()
        return max((self._state_bytes(parameters[name]) for name in others), default=0)

    def _keeps_bits(self, spec: ParameterSpec) -> bool:
        """Whether ranges of a stack are updated and coded as the whole is."""
        own, rule = spec.tensor.stride[0], self._rules(spec.name)
        if spec.trainable and not rule.elementwise:
            return False
        coded = spec.quantized is not None
        if spec.trainable:
            whole, one = (
                rule.stored(shape) for shape in (spec.tensor.shape, spec.tensor.shape[1:])
            )
            kinds = [{name: dtype for name, (_, dtype) in each.items()} for each in (whole, one)]
            if kinds[0] != kinds[1]:
                return False
            coded = any(dtype != "float32" for dtype in kinds[0].values()) or spec.rounded
        return own % (_CODED_ELEMENTS if coded else _FUSED_ELEMENTS) == 0

    def _why_none(self, experts: int) -> str:
        said = f"memory.experts is {experts}, and "
        if not self._found:
            said += (
                "no weight of the model stacks experts that a grouped product reads (torch's "
                "_grouped_mm, as transformers' mixtures do)"
            )
        else:
            name = next(iter(self._found))
            said += (
                f"ranges of {name} would not be updated as the whole is: by optimizer."
                f"{self._config.optimizer.name}, or since an expert has not a multiple of "
                f"{_CODED_ELEMENTS} numbers"
            )
        return f"{said}: set it to null"


def _even(experts: int, most: int) -> int:
    """Return the largest divisor up to `most`, if it is half of it; else `most` itself.

    Ranges of one size share their code.
    """
    divisor = next(n for n in range(most, 0, -1) if experts % n == 0)
    return divisor if 2 * divisor >= most else most
