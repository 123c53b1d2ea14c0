"""What held-out data says of a step: for metrics.jsonl, and for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["EvalResult"]


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found."""

    loss: float
    by_tokens: bool = False
    """Whether it is a mean over tokens."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Means of what the forward returns beside its loss, and `accuracy` where that is known."""

    @property
    def perplexity(self) -> float | None:
        """The exponential of a mean over tokens; None where the loss is another mean."""
        if not self.by_tokens:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def row(self) -> dict[str, float]:
        """Return its part of a row of metrics.jsonl."""
        found = {"eval_loss": self.loss}
        if self.perplexity is not None:
            found["eval_perplexity"] = self.perplexity
        return found | {f"eval_{name}": value for name, value in self.scalars.items()}

    def text(self) -> str:
        """Return it in one line's words."""
        parts = [f"eval {self.loss:.4f}"]
        if self.perplexity is not None:
            form = ",.2f" if self.perplexity < 1e6 else ".3g"
            parts.append(f"perplexity {self.perplexity:{form}}")
        parts += [f"{name} {value:.4g}" for name, value in self.scalars.items()]
        return ", ".join(parts)
