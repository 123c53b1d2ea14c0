"""Which parameters of a captured model are divided into ranges of rows, and how large those are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import gcd, lcm, prod

from swaptrain.capture.evaluation.graph import UncutEvaluation
from swaptrain.capture.ranges.divide import (
    divide,
    divide_evaluation,
    divisible_parameters,
    whole_embeddings,
)
from swaptrain.capture.uncut import Uncut
from swaptrain.compute.update import Rules
from swaptrain.config.schema import Config
from swaptrain.errors import ConfigError
from swaptrain.models.build import BuiltModel
from swaptrain.program.model import ParameterSpec
from swaptrain.program.row_ranges import WHOLE, RangeSizes, RowRange, range_of, row_ranges

__all__ = ["DividedModel"]

_FUSED_ELEMENTS = 16
"""A fused optimizer gives the bits of the whole from multiples of so many elements on."""
_CODED_ELEMENTS = 256
"""A block of 8-bit state, and four of nf4: the codes of a range are those of the whole."""
_NONE = {
    "experts": "no weight of the model stacks experts that a grouped product reads (torch's "
    "_grouped_mm, as transformers' mixtures do)",
    "rows": "the model has no embedding that lookups alone read (a head that is tied to it reads "
    "it too)",
}


class DividedModel:
    """A captured model with its largest parameters divided, for each size of ranges only once.

    These are stacks of experts, [experts, rows, columns], and embeddings, [rows, columns].
    """

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
        self.said = RangeSizes(config.memory.experts, config.memory.rows)
        """What the config says of the ranges' sizes."""
        self._divided: dict[RangeSizes, tuple[Uncut, Sequence[UncutEvaluation]]] = {
            WHOLE: (built.uncut, built.evaluations)
        }

    def fitting(self, target_bytes: int) -> RangeSizes:
        """Return ranges about as large as a segment of this size, where the config says none.

        Or as the largest of the other parameters: memory has to hold that one too. None where each
        stack, or embedding, is small enough as it is.
        """
        found = self.said
        own_bytes = max(target_bytes, self._largest_other_bytes)
        for spec in self._divisible.values():
            count, size_bytes = spec.tensor.shape[0], self._state_bytes(spec)
            if size_bytes <= max(2 * target_bytes, own_bytes) or count <= 1:
                continue
            most = max(1, min(count - 1, count * own_bytes // size_bytes))
            if not _is_stack(spec):
                if self.said.rows is None:
                    rows = _even_rows(count, most, self._rows_granule)
                    found = replace(found, rows=min(rows, found.rows or rows))
            elif self.said.experts is None:
                experts = _even(count, most, self._found[spec.name])
                found = replace(found, experts=min(experts, found.experts or experts))
        return found

    def divided(self, sizes: RangeSizes) -> tuple[Uncut, Sequence[UncutEvaluation]]:
        """Return the graphs with ranges of these sizes at the most; `WHOLE`: as they are.

        Raises ConfigError where the model has nothing that can be divided so.
        """
        if sizes not in self._divided:
            found = dict(self._ranges(sizes))
            if not found:  # one of each would hold it
                return self._divided[WHOLE]
            self._divided[sizes] = (
                divide(self._built.uncut, found),
                [divide_evaluation(each, found) for each in self._built.evaluations],
            )
        return self._divided[sizes]

    def _ranges(self, sizes: RangeSizes) -> Iterator[tuple[str, tuple[RowRange, ...]]]:
        """Yield what is divided, with its ranges; raises as `divided` does."""
        for key, most in {"experts": sizes.experts, "rows": sizes.rows}.items():
            if most is None:
                continue
            every = (self._built.uncut.parameters[name] for name in self._found)
            specs = [s for s in every if _is_stack(s) == (key == "experts")]
            own = next((n for n in self._built.uncut.parameters if range_of(n)), None)
            if own is not None:
                raise ConfigError(
                    f"memory.{key} is {most}, and the parameter {own} has the name of a range: "
                    "rename it, or set the key to null"
                )
            if not specs:
                raise ConfigError(f"memory.{key} is {most}, and {_NONE[key]}: set it to null")
            larger = [spec for spec in specs if spec.tensor.shape[0] > most]
            if not larger and key == "rows":
                self._check_whole_embeddings(most)
            for spec in larger:
                if self._keeps_bits(spec, most):
                    yield spec.name, tuple(row_ranges(spec.name, spec.tensor.shape[0], most))
                elif most == getattr(self.said, key):
                    raise ConfigError(self._why_not(key, most, spec))

    def _check_whole_embeddings(self, most: int) -> None:
        """Raise ConfigError where all embeddings of more rows are whole."""
        for name, spec in whole_embeddings(self._built.uncut).items():
            if spec.tensor.shape[0] > most:
                raise ConfigError(
                    f"memory.rows is {most}, and {name}, with {spec.tensor.shape[0]} rows, cannot "
                    "be divided, since not lookups alone read it (a head that is tied to it does), "
                    "or since its gradient is sparse or scaled: set it to null"
                )

    @cached_property
    def _found(self) -> Mapping[str, int]:
        uncut = self._built.uncut
        if any(range_of(name) for name in uncut.parameters):
            return {}  # who has such a name would be taken for a range
        return divisible_parameters(uncut, self._built.evaluations)

    @cached_property
    def _divisible(self) -> Mapping[str, ParameterSpec]:
        """Return what can be divided into ranges of some size."""
        every = {name: self._built.uncut.parameters[name] for name in self._found}
        return {
            name: spec
            for name, spec in every.items()
            if spec.tensor.shape[0] >= 2 * self._found[name]
            and self._keeps_bits(spec, self._some_range(spec))
        }

    def _some_range(self, spec: ParameterSpec) -> int:
        """Return of how many rows a range may be: the fewest experts, or half of an embedding."""
        count, least = spec.tensor.shape[0], self._found[spec.name]
        if _is_stack(spec):
            return _even(count, least, least)
        return _even_rows(count, -(-count // 2), self._granule(spec))

    @cached_property
    def _largest_other_bytes(self) -> int:
        parameters = self._built.uncut.parameters
        others = parameters.keys() - self._divisible.keys()
        return max((self._state_bytes(parameters[name]) for name in others), default=0)

    @cached_property
    def _rows_granule(self) -> int:
        """Of how many rows ranges of all embeddings can have a multiple."""
        return lcm(*(self._granule(s) for s in self._divisible.values() if not _is_stack(s)))

    def _keeps_bits(self, spec: ParameterSpec, most: int) -> bool:
        """Whether ranges of so many rows are updated and coded as the whole is."""
        if spec.trainable and not self._rules(spec.name).elementwise:
            return False
        shape = spec.tensor.shape
        kinds = self._kinds(spec, shape)
        counts = {min(most, shape[0]), shape[0] % most or most}
        if most < shape[0] and min(counts) < self._found[spec.name]:
            return False
        if any(self._kinds(spec, (count, *shape[1:])) != kinds for count in counts):
            return False
        return most >= shape[0] or most % self._granule(spec) == 0

    def _kinds(self, spec: ParameterSpec, shape: Sequence[int]) -> Mapping[str, str]:
        """Return the dtypes of a parameter's optimizer state, which a small one has in float32."""
        if not spec.trainable:
            return {}
        stored = self._rules(spec.name).stored(tuple(shape))
        return {name: dtype for name, (_, dtype) in stored.items()}

    def _granule(self, spec: ParameterSpec) -> int:
        """Return of how many rows a range has to have a multiple."""
        coded = spec.quantized is not None
        if spec.trainable:
            kinds = self._kinds(spec, spec.tensor.shape).values()
            coded = spec.rounded or any(dtype != "float32" for dtype in kinds)
        elements = _CODED_ELEMENTS if coded else _FUSED_ELEMENTS
        return elements // gcd(elements, prod(spec.tensor.shape[1:]))

    def _why_not(self, key: str, most: int, spec: ParameterSpec) -> str:
        said = (
            f"memory.{key} is {most}, and ranges of {spec.name} would not be updated as the whole"
        )
        if spec.trainable and not self._rules(spec.name).elementwise:
            return f"{said} is, since its optimizer looks at all of it: set memory.{key} to null"
        granule = self._granule(spec)
        if most % granule:
            return f"{said} is, from a number on that is no multiple of {granule}: set it to one"
        least, last = self._found[spec.name], spec.tensor.shape[0] % most
        if most < least or 0 < last < least:
            others = f"{least}, or another number that leaves no less than that, or to null"
            return f"{said} is: so few experts have other last bits: set memory.{key} to {others}"
        return (
            f"{said} is: the last one is so small that its optimizer state stays float32: set "
            f"memory.{key} to {-(-spec.tensor.shape[0] // 2 // granule) * granule}, or to null"
        )


def _is_stack(spec: ParameterSpec) -> bool:
    """Whether a parameter that can be divided stacks experts; else it is an embedding."""
    return len(spec.tensor.shape) == 3


def _even(experts: int, most: int, least: int) -> int:
    """Return the largest divisor up to `most`, if it is half of it; else `most` itself.

    Ranges of one size share their code. Each has `least` experts, so it may be some more.
    """
    divisor = next(n for n in range(most, 0, -1) if experts % n == 0)
    found = max(least, divisor if 2 * divisor >= most else most)
    return next((n for n in range(found, experts) if (experts % n or n) >= least), experts)


def _even_rows(rows: int, most: int, granule: int) -> int:
    """Return how many rows make ranges that are about alike: a multiple of `granule`."""
    each = -(-rows // -(-rows // most))
    return -(-each // granule) * granule
