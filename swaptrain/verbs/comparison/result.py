"""What a comparison with plain PyTorch found."""

from __future__ import annotations

from dataclasses import dataclass

from swaptrain.units import how_many
from swaptrain.verbs.inspection.differences import TensorDifference

__all__ = ["ComparedFigure", "JobComparison"]

_LAST_DIGITS = 1e-5


@dataclass(frozen=True)
class ComparedFigure:
    """A number of a step, as both say it."""

    step: int
    name: str
    """`loss`, `grad_norm` or `eval_loss`."""
    plain: float | None
    """None where it is not finite."""
    stored: float | None
    exact: bool = True
    """Whether equal bits are promised: not of norms that swaptrain adds up by blocks."""

    @property
    def difference(self) -> float | None:
        """swaptrain's minus plain PyTorch's; None where one is not finite."""
        if self.plain is None or self.stored is None:
            return None
        return self.stored - self.plain

    @property
    def is_equal(self) -> bool:
        """Whether both are the same number."""
        return self.plain == self.stored

    @property
    def agrees(self) -> bool:
        """Whether both are as equal as is promised."""
        if self.is_equal or self.exact or self.difference is None or self.plain is None:
            return self.is_equal
        return abs(self.difference) <= _LAST_DIGITS * abs(self.plain)


@dataclass(frozen=True)
class JobComparison:
    """The same steps in plain PyTorch and in swaptrain."""

    figures: tuple[ComparedFigure, ...]
    tensors: tuple[str, ...]
    """All that were compared, in the model's order."""
    differing: tuple[TensorDifference, ...]
    """Relative to plain PyTorch's, in the model's order."""
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names that only plain PyTorch has, and only swaptrain."""

    @property
    def agrees(self) -> bool:
        """Whether all bits are equal that are promised to be."""
        figures = all(figure.agrees for figure in self.figures)
        return figures and not self.differing and not any(self.only)

    def conclusion(self) -> str:
        """Say it in one line."""
        if self.agrees:
            loose = [figure for figure in self.figures if not figure.is_equal]
            but = ", but for the last digits of the norms, which blocks add up" if loose else ""
            steps = len({figure.step for figure in self.figures})
            return (
                f"equal bit for bit: {how_many(steps, 'step')}, "
                f"{how_many(len(self.tensors), 'tensor')} of the final weights and buffers{but}"
            )
        said = [f"the {f.name} of step {f.step}" for f in self.figures if not f.agrees][:1]
        if self.differing:
            first = self.differing[0]
            large = (
                f"{first.differing:,} of {how_many(first.elements, 'element')}, "
                f"{first.largest:.3g} at most"
            )
            if not first.elements:
                large = f"shapes {list(first.shapes[0])} and {list(first.shapes[1])}"
            said.append(
                f"{len(self.differing)} of {how_many(len(self.tensors), 'tensor')}, first in the "
                f"model's order {first.name} ({large})"
            )
        for names, who in zip(self.only, ("plain PyTorch", "swaptrain"), strict=True):
            if names:
                said.append(
                    f"{how_many(len(names), 'tensor')} that only {who} has, {names[0]} first"
                )
        return f"swaptrain and plain PyTorch differ: {'; '.join(said)}"
