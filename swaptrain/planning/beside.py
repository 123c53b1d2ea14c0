"""What a start knows of the processes beside it: ranks of one run, on this machine and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swaptrain.capture.captured import Captured
from swaptrain.errors import ConfigError
from swaptrain.program.ranks import ALONE, Ranks
from swaptrain.ranks.agreement import echoed

__all__ = ["NOBODY", "Beside", "FixedCut", "check_divisible"]


@dataclass(frozen=True)
class FixedCut:
    """A cut that is not to be chosen: that of another rank."""

    cuts: tuple[int, ...]
    chunk: int
    """Largest chunk file, in bytes."""
    experts: int | None = None
    """Experts of a range, where stacks of experts are divided."""


@dataclass(frozen=True)
class Beside:
    """The other ranks of a run; none, where it has one process."""

    ranks: Ranks = ALONE
    local_count: int = 1
    """Ranks on this machine, which share its cores."""
    device: str | None = None
    """The device of this rank; None: that of the config."""
    same_cut: Callable[[FixedCut | None], FixedCut | None] = lambda cut: cut
    """Gives all ranks the cut of rank 0, which has chosen it; the others give None."""


NOBODY = Beside()
"""A run of one process."""


def check_divisible(captured: Captured, state: dict[int, bool], ranks: Ranks) -> None:
    """Raise ConfigError, in all ranks, for a model that so many cannot own together.

    `state` says by segment whether an update changes anything of it.
    """
    text = _undivided(captured, state, ranks)
    if text is not None:
        raise echoed(ConfigError(text))


def _undivided(captured: Captured, state: dict[int, bool], ranks: Ranks) -> str | None:
    if ranks.count == 1:
        return None
    if captured.model.buffers:
        return (
            f"the forward changes the buffer {next(iter(captured.model.buffers))} (batch norm in "
            "training mode does), and several ranks would each change their own: train with one "
            "process, or with a norm that keeps none"
        )
    if captured.hooks:
        return (
            f"the gradient of {next(iter(captured.hooks))} has a hook, which several ranks would "
            "call with parts of it: train with one process, or take the hook away"
        )
    without = [
        r for r in range(ranks.count) if not any(state[k] for k in state if _is(k, r, ranks))
    ]
    if without:
        return (
            f"{ranks.count} ranks and {len(state)} segments, {sum(state.values())} of which are "
            f"trained: rank {without[0]} would own none that is. Start fewer ranks, or set "
            "memory.segment to less"
        )
    return None


def _is(segment: int, rank: int, ranks: Ranks) -> bool:
    return ranks.owner(segment) == rank
